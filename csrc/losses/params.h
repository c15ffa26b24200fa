// The launchers and the parameters of the kernels that process a chunk of rows of logits. This
// header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "losses/rows.h"

namespace torchweld {

// A chunk of rows of fp32 logits (rows, n), and vectors with one element for each of these rows.
struct LossChunk {
  float* logits;
  int64_t row_stride;  // in elements, a multiple of 4; `logits` is 16-byte aligned
  int64_t rows;
  int64_t n;
  const void* bias;  // (n,) in `dtype`, or nullptr
  DType dtype;       // the dtype of x, weight and bias
  const int64_t* targets;
  bool ignores;
  int64_t ignore_index;
  bool cross_entropy;  // true for a cross entropy, false for log-probabilities
  LogitScale<float> scale;
  CrossEntropyTerms<float> terms;
  float* loss;  // the losses of a cross entropy, or the log-probabilities
  float* lse;
  float* entropy;  // nullptr if not requested
  float* mean;     // nullptr if not requested
};

// Launches the kernel that computes loss, lse and entropy of every row that is not ignored.
void launch_loss_statistics(const LossChunk& chunk, cudaStream_t stream);

// The parameters of the kernel that overwrites each row of logits with its gradient. The gradient
// has the dtype chunk.dtype and starts at the first byte of the row. The gradient of an ignored row
// is 0. The kernel reads lse and entropy of `chunk`. dloss has stride 0 or 1. dentropy, dlse and
// dmean may be nullptr.
struct LossGradientParams {
  LossChunk chunk;
  const float* dloss;
  int64_t dloss_stride;
  const float* dentropy;
  const float* dlse;
  const float* dmean;
};
void launch_loss_gradient(const LossGradientParams& params, cudaStream_t stream);

// The parameters of the kernel that computes y = x * factor[0]. y may be x. If y is x and the
// factor is 1, the kernel returns at once.
struct LossScaleParams {
  const void* x;
  void* y;
  const float* factor;
  int64_t size;
  DType dtype;
};
void launch_loss_scale(const LossScaleParams& params, cudaStream_t stream);

}  // namespace torchweld
