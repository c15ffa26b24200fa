// Kernels over given logits, and their parameters. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "core/dtype.h"
#include "losses/rows.h"

namespace torchweld {

// Rows of logits, and the vectors of all rows. A row that is ignored keeps its loss and lse, and
// its dlogits become 0.
struct CrossEntropyParams {
  const void* logits;  // (rows, n) of dtype
  int64_t row_stride;
  int64_t rows;
  int64_t n;
  DType dtype;
  const int64_t* targets;
  int64_t ignore_index;
  LogitScale<float> scale;
  float inverse_temperature;  // NOTE: a division would take a third of a row's instructions
  CrossEntropyTerms<float> terms;
  float* loss;  // nullptr: lse is given
  float* lse;
  const float* dloss;    // nullptr without a gradient
  int64_t dloss_stride;  // 0 or 1
  void* dlogits;         // (rows, n) of dtype, contiguous; nullptr: no gradient
};

// `counter` gives a counter that is 0, where a kernel needs one.
void launch_cross_entropy(const CrossEntropyParams& params,
                          const std::function<unsigned*()>& counter, cudaStream_t stream);

}  // namespace torchweld
