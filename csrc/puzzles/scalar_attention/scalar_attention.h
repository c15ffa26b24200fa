// The kernel parameters of scalar_attention and its backward.
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
  float* mean;     // (n,), contiguous: z before rounding; nullptr if mean and sum are not needed
  float* sum;      // (n,), contiguous
  float* scratch;  // scalar_attention_scratch_floats() floats
  int64_t n;
  DType dtype;
};

struct ScalarAttentionBackwardParams {
  ScalarAttentionVector dz, q, k, v;
  const float* mean;  // (n,), contiguous
  const float* sum;   // (n,), contiguous
  void* dq;           // (n,), contiguous; dq, dk and dv are nullptr if not needed
  void* dk;
  void* dv;
  float* scratch;
  int64_t n;
  DType dtype;
};

// Returns the number of floats in `scratch` for a launch on the current device.
int64_t scalar_attention_scratch_floats(int64_t n, bool backward);

void launch_scalar_attention(const ScalarAttentionParams& params, cudaStream_t stream);
void launch_scalar_attention_backward(const ScalarAttentionBackwardParams& params,
                                      cudaStream_t stream);

}  // namespace torchweld
