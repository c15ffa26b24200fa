// The interface of the matmul engine: y = epilogue(a @ b^T), batched. This header does not use
// torch.
//
// The shapes are a (M, K), b (N, K) and y (M, N). One of the two strides of each matrix is 1. b may
// be a pair: two matrices with the same strides. These are the two halves (N, K) of a gated
// product, or two matrices side by side along K.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation_kind.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "gemm/config.h"

namespace torchweld {

// NOTE: the data pointer, the batch stride, the half stride and the stride of the non-contiguous
// dim are multiples of 16 bytes. The contiguous dim has whole 16-byte chunks. If that dim is K, the
// last chunk holds zeros behind K. layers/matmul.cpp copies operands that don't meet this.
struct GemmOperand {
  const void* data;
  int64_t row_stride;       // elements from one row (M or N) to the next
  int64_t k_stride;         // elements from one column (K) to the next
  int64_t batch_stride;     // 0: every batch reads the same matrix
  int64_t half_stride = 0;  // elements from a pair's first matrix to its second; may be negative
  // For a pair side by side along K, the number of columns of each matrix, a multiple of a k-block;
  // otherwise 0. The kernels support such a pair only as an MN-major b with a K-major a.
  int64_t k_half = 0;

  // Returns the number of elements to add to the offset k * k_stride if column k lies in the second
  // matrix of a pair along K.
  TW_HOST_DEVICE int64_t half_jump() const { return half_stride - k_half * k_stride; }
};

struct GemmEpilogue {
  const void* bias = nullptr;  // (N,), or (2N,) if gated
  bool bias_fp32 = false;      // the bias is fp32 whatever the dtype of the operands
  Activation activation = Activation::kNone;
  bool gated = false;
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // if gated: left and right values alternate in bias and preact
  // If not null, the epilogue also stores z = a @ b^T + bias, (M, N) or (M, 2N). Its rows are
  // contiguous and its batch stride is y's.
  void* preact = nullptr;
};

// A norm of the rows of a before the product, see norm/norm.h. Only the engine for few rows
// supports it. scale and shift have the dtype of the operands, and a row of K elements is a
// multiple of 16 bytes.
struct GemmNorm {
  bool given = false, centred = false;
  float eps = 0;
  const void* scale = nullptr;  // (K,) on a 16-byte boundary; nullptr: ones
  const void* shift = nullptr;  // (K,) on a 16-byte boundary; nullptr: zeros
  float* mean = nullptr;        // (M,), or nullptr if not requested
  float* rstd = nullptr;
};

struct GemmParams {
  int64_t m, n, k, batch;  // n is the number of columns of y: half of b's rows if gated
  GemmOperand a, b;
  void* y;
  int64_t y_row_stride, y_batch_stride;  // the columns of y are contiguous
  DType dtype;
  bool tf32;  // fp32 operands may be rounded to TF32
  GemmNorm norm;
  GemmEpilogue epilogue;
  GemmChoice choice;
  float* workspace;  // choice.workspace_floats(...) floats, or nullptr if that is 0
  uint64_t* flags;   // choice.flags(...) flags, or nullptr if that is 0
  void* written;  // gemm_written_bytes(...) bytes for rewritten operands, or nullptr if that is 0
  // Partial sums over the rows of a in fp32, (choice.dbias_partials(...), M), or nullptr if they
  // are not requested.
  float* dbias_partials;
};

// The bytes of scratch memory for operands that the chosen engine copies to another format, or 0 if
// the engine reads the operands as they are.
int64_t gemm_written_bytes(const GemmParams& params);

// Throws std::runtime_error if the launch fails. All sizes must be at least 1.
void launch_gemm(const GemmParams& params, cudaStream_t stream);

// Adds up the split-K partials in the workspace: y = epilogue(sum of the partials).
void launch_gemm_sum(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
