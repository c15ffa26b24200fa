// The statistics of a row in the CUDA kernels of a norm.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// Normalises the values of a row. first_mean is the rounded mean, and `rest` is its rounding error.
// normalise() subtracts both from x, so the error does not grow with |mean| / std (see
// norm/forward.cuh).
struct RowNormaliser {
  float first_mean, rest, rstd;

  __device__ __forceinline__ float mean() const { return first_mean + rest; }
  __device__ __forceinline__ float normalise(float x) const {
    return fmaf(x - first_mean, rstd, -rest * rstd);
  }
};

// Computes the statistics of a row of n values. sums.x is the sum of x - first_mean over the row,
// and sums.y is the sum of (x - first_mean)^2.
__device__ __forceinline__ RowNormaliser finish_statistics(int64_t n, float eps, bool centred,
                                                           float first_mean, float2 sums) {
  const float count = static_cast<float>(n), rest = centred ? sums.x / count : 0.f;
  const float variance = sums.y / count - rest * rest;
  // NOTE: fmaxf is not used, because it would replace a NaN variance by 0.
  return {first_mean, rest, 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps)};
}

}  // namespace torchweld
