// The kernels that process a chunk of rows of logits, and their parameters. This header does not
// use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "losses/rows.h"

namespace torchweld {

// A chunk of rows of logits (rows, n) in fp32, and the vectors that belong to these rows.
struct LossChunk {
  float* logits;
  int64_t row_stride;  // a multiple of 4; logits is 16-byte aligned
  int64_t rows;
  int64_t n;
  const void* bias;  // (n,) in `dtype`, or nullptr
  DType dtype;       // of x, weight and bias
  const int64_t* targets;
  bool ignores;
  int64_t ignore_index;
  bool cross_entropy;  // true for a cross entropy, false for log-probabilities
  LogitScale<float> scale;
  CrossEntropyTerms<float> terms;
  float* loss;  // loss or log-probability
  float* lse;
  float* entropy;  // nullptr if not requested
};

// Writes loss, lse and entropy of every row that is not ignored.
void launch_loss_statistics(const LossChunk& chunk, cudaStream_t stream);

// Overwrites each row of logits by its gradient, of dtype, from the row's first byte on; a row that
// is ignored becomes 0. Reads lse and entropy. dloss has stride 0 or 1; dentropy and dlse may be
// nullptr.
struct LossGradientParams {
  LossChunk chunk;
  const float* dloss;
  int64_t dloss_stride;
  const float* dentropy;
  const float* dlse;
};
void launch_loss_gradient(const LossGradientParams& params, cudaStream_t stream);

// Computes y = x * factor[0]. y may be x. If it is and the factor is 1, the kernel returns without
// touching them.
struct LossScaleParams {
  const void* x;
  void* y;
  const float* factor;
  int64_t size;
  DType dtype;
};
void launch_loss_scale(const LossScaleParams& params, cudaStream_t stream);

}  // namespace torchweld
