// The parameters that the host passes to the kernels of softmax_matmul.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/mask.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/refusal.h"

namespace torchweld {

// A tensor (batch, nheads, rows, columns) with stride 1 along the last dimension. Strides are in
// elements.
struct HeadsOperand {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  bool aligned;  // every row starts on a 16-byte boundary
};

struct SoftmaxMatmulProblem {
  MaskParams mask;
  int64_t batch;
  int64_t nheads;
  int64_t head_dim_v;
  float scale;
  DType dtype;
  bool tf32;  // fp32 matmuls may round their operands to TF32
};

struct SoftmaxMatmulParams {
  SoftmaxMatmulProblem problem;
  HeadsOperand scores;  // (batch, nheads, seqlen_q, seqlen_k)
  HeadsOperand value;   // (batch, nheads, seqlen_k, head_dim_v)
  void* out;            // (batch, nheads, seqlen_q, head_dim_v), contiguous
  float* lse;           // (batch, nheads, seqlen_q), contiguous, or nullptr
  // The ticket counter of Hopper's kernel. It is 0 before and after a call. If another kernel runs,
  // `counters` is nullptr.
  unsigned* counters;
};

// Whether Hopper's kernel (ops/softmax_matmul/sm90.cuh) supports the problem.
inline constexpr int kSoftmaxMatmulSm90Bytes = 227 * 1024;
inline bool softmax_matmul_uses_sm90(const SoftmaxMatmulProblem& p, const HeadsOperand& scores,
                                     const HeadsOperand& value, const DeviceFacts& device) {
  constexpr int64_t kMaxColumns = 256, kMaxSeqlen = int64_t{1} << 29;
  const double tiles = static_cast<double>(p.batch) * static_cast<double>(p.nheads) *
                       (static_cast<double>(p.mask.seqlen_q) / 128 + 1);
  return device.wgmma && device.tma && device.shared_limit >= kSoftmaxMatmulSm90Bytes &&
         p.dtype != DType::kFloat32 && scores.aligned && value.aligned && p.head_dim_v > 0 &&
         p.head_dim_v <= kMaxColumns && p.head_dim_v % 8 == 0 && p.mask.seqlen_q <= kMaxSeqlen &&
         p.mask.seqlen_k <= kMaxSeqlen && grid_fits(tiles + device.sms);
}

struct SoftmaxMatmulBackwardParams {
  SoftmaxMatmulProblem problem;
  HeadsOperand scores;
  HeadsOperand value;
  HeadsOperand out;
  HeadsOperand dout;
  const float* lse;  // contiguous
  void* dscores;     // contiguous
  void* dvalue;      // contiguous
  // (batch, nheads, seqlen_q): the term of each row in the sum dsink, or nullptr. The memory must
  // be zero before the launch.
  float* sink_terms;
};

// csrc/instantiations.py generates the file that instantiates this template.
template <typename T, bool kMasked>
void launch_softmax_matmul_sm90(const SoftmaxMatmulParams& params, cudaStream_t stream);

// Launch functions. No size may be 0, except head_dim_v in the forward.
void launch_softmax_matmul(const SoftmaxMatmulParams& params, cudaStream_t stream);
void launch_softmax_matmul_dscores(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream);
void launch_softmax_matmul_dvalue(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
