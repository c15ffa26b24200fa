// The kernels of cross_entropy and their parameters. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "core/dtype.h"
#include "losses/rows.h"

namespace torchweld {

// The rows of logits and the vectors over the rows. For an ignored row, the kernels don't write
// `loss`, `max` and `log_sum`, and they set `dlogits` to 0.
struct CrossEntropyParams {
  const void* logits;  // (rows, n) in `dtype`
  int64_t row_stride;
  int64_t rows;
  int64_t n;
  DType dtype;
  const int64_t* targets;
  int64_t ignore_index;
  LogitScale<float> scale;
  // NOTE: kernels multiply by the inverse, because divisions would be a third of all instructions.
  float inverse_temperature;
  CrossEntropyTerms<float> terms;
  float* loss;  // nullptr if `max` and `log_sum` are inputs
  float* max;
  float* log_sum;
  const float* dloss;    // nullptr if no gradient is requested
  int64_t dloss_stride;  // 0 or 1
  void* dlogits;         // (rows, n) in `dtype`, contiguous; nullptr if no gradient is requested
};

// Launches the kernel. If the chosen kernel needs a counter, this function calls `counter`, which
// must return the address of a counter with the value 0.
void launch_cross_entropy(const CrossEntropyParams& params,
                          const std::function<unsigned*()>& counter, cudaStream_t stream);

}  // namespace torchweld
