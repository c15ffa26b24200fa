// The parameters that the host passes to the kernel of fold_layer_norm.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct FoldParams {
  const void* weight;     // (n, k), any strides
  const void* bias;       // (n,), or nullptr for zeros
  const void* ln_weight;  // (k,), or nullptr for ones
  const void* ln_bias;    // (k,), or nullptr for zeros
  void* folded_weight;    // (n, k), contiguous
  float* weight_sum;      // (n,)
  float* folded_bias;     // (n,)
  int64_t n;
  int64_t k;
  int64_t weight_row_stride;
  int64_t weight_column_stride;
  DType dtype;
};

// Launches the kernel of fold_layer_norm. n must be at least 1.
void launch_fold_layer_norm(const FoldParams& params, cudaStream_t stream);

}  // namespace torchweld
