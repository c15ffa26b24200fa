// The matmul engine as its callers see it: y = epilogue(a @ b^T), batched. Torch-free.
//
//   a (M, K), b (N, K), y (M, N); one stride of each operand is 1. A gated product has b (2N, K).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation_kind.h"
#include "core/dtype.h"
#include "gemm/config.h"

namespace torchweld {

// NOTE: the base, the batch stride and whichever of row_stride and k_stride is not 1 are multiples
// of 16 bytes. The contiguous dim has whole 16-byte chunks; if it is K, memory up to the end of the
// last chunk holds zeros. layers/matmul.cpp copies other operands.
struct GemmOperand {
  const void* data;
  int64_t row_stride;    // elements from one row (M or N) to the next
  int64_t k_stride;      // elements from one column (K) to the next
  int64_t batch_stride;  // 0: every batch reads the same matrix
};

struct GemmEpilogue {
  const void* bias = nullptr;  // (N,), or (2N,) where gated
  bool bias_fp32 = false;      // bias is fp32, whatever the operands are
  Activation activation = Activation::kNone;
  bool gated = false;
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // gated: the left and right halves are the even and odd rows of b
  // Where requested: z = a @ b^T + bias, (M, N) or (M, 2N), contiguous but for y's batch stride.
  void* preact = nullptr;
};

// A norm of a's rows before the product, see norm/norm.h; only the engine for few rows supports it.
// scale and shift have the operands' dtype; K is a multiple of 16 bytes.
struct GemmNorm {
  bool given = false, centred = false;
  float eps = 0;
  const void* scale = nullptr;  // (K,) on a 16-byte boundary; nullptr: ones
  const void* shift = nullptr;  // (K,) on a 16-byte boundary; nullptr: zeros
  float* mean = nullptr;        // (M,), where requested
  float* rstd = nullptr;
};

struct GemmParams {
  int64_t m, n, k, batch;  // n is y's width: half of b's rows where gated
  GemmOperand a, b;
  void* y;
  int64_t y_row_stride, y_batch_stride;  // columns are contiguous
  DType dtype;
  bool tf32;  // fp32 operands may be rounded to TF32
  GemmNorm norm;
  GemmEpilogue epilogue;
  GemmChoice choice;
  float* workspace;  // choice.workspace_floats(...) floats, nullptr where that is 0
  uint64_t* flags;   // choice.flags(...) flags, nullptr where that is 0
  void* written;     // gemm_written_bytes(...) bytes, nullptr where that is 0
  // Partial sums of a's rows, fp32 (choice.dbias_partials(...), M); nullptr where not requested.
  float* dbias_partials;
};

// Bytes for the operands that the chosen engine rewrites; 0 where it reads them in place.
int64_t gemm_written_bytes(const GemmParams& params);

// Throws std::runtime_error where the launch fails. Sizes are at least 1.
void launch_gemm(const GemmParams& params, cudaStream_t stream);

// Adds up the splits of a product in the workspace: y = epilogue(sum).
void launch_gemm_sum(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
