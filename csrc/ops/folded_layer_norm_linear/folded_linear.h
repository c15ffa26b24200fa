// fold_layer_norm: what the host hands to the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct FoldParams {
  const void* weight;     // (n, k), any strides
  const void* bias;       // (n,), nullptr: 0
  const void* ln_weight;  // (k,), nullptr: 1
  const void* ln_bias;    // (k,), nullptr: 0
  void* folded_weight;    // (n, k), contiguous
  float* weight_sum;      // (n,)
  float* folded_bias;     // (n,)
  int64_t n;
  int64_t k;
  int64_t weight_row_stride;
  int64_t weight_column_stride;
  DType dtype;
};

// n is at least 1.
void launch_fold_layer_norm(const FoldParams& params, cudaStream_t stream);

}  // namespace torchweld
