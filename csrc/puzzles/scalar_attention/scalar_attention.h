// Kernel parameters of scalar_attention and its gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct ScalarAttentionVector {
  const void* data;  // (n,)
  int64_t stride;
};

struct ScalarAttentionParams {
  ScalarAttentionVector q, k, v;
  void* z;         // (n,), contiguous
  float* mean;     // (n,), contiguous: z unrounded; nullptr, like sum, if not needed
  float* sum;      // (n,), contiguous
  float* scratch;  // scalar_attention_scratch_floats
  int64_t n;
  DType dtype;
};

struct ScalarAttentionBackwardParams {
  ScalarAttentionVector dz, q, k, v;
  const float* mean;  // (n,), contiguous
  const float* sum;   // (n,), contiguous
  void* dq;           // (n,), contiguous; nullptr, like dk and dv, if not needed
  void* dk;
  void* dv;
  float* scratch;
  int64_t n;
  DType dtype;
};

// Floats of `scratch` that a launch needs on the current device.
int64_t scalar_attention_scratch_floats(int64_t n, bool backward);

void launch_scalar_attention(const ScalarAttentionParams& params, cudaStream_t stream);
void launch_scalar_attention_backward(const ScalarAttentionBackwardParams& params,
                                      cudaStream_t stream);

}  // namespace torchweld
