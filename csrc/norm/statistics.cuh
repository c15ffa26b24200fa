// The statistics of a row in the CUDA kernels of a norm.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// Normalises the values of a row. The mean has two parts: first_mean is the rounded mean and `rest`
// its rounding error. Subtracting both keeps the error from growing with |mean| / std (see
// norm/forward.cu).
struct RowNormaliser {
  float first_mean, rest, rstd;

  __device__ __forceinline__ float mean() const { return first_mean + rest; }
  __device__ __forceinline__ float normalise(float x) const {
    return fmaf(x - first_mean, rstd, -rest * rstd);
  }
};

// Computes the statistics of a row of n values. sums.x is the sum of x - first_mean and sums.y the
// sum of (x - first_mean)^2.
__device__ __forceinline__ RowNormaliser finish_statistics(int64_t n, float eps, bool centred,
                                                           float first_mean, float2 sums) {
  const float count = static_cast<float>(n), rest = centred ? sums.x / count : 0.f;
  const float variance = sums.y / count - rest * rest;
  // NOTE: the code uses `<` and not fmaxf, because fmaxf would replace NaN by 0.
  return {first_mean, rest, 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps)};
}

}  // namespace torchweld
