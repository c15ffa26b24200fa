// The statistics of a row as the norm's kernels have them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// Not by one mean alone: what rounding left in the first one is `rest`, and with both taken off one
// after the other the result does not depend on |mean| / std (norm/forward.cu).
struct RowNormaliser {
  float first_mean, rest, rstd;

  __device__ __forceinline__ float mean() const { return first_mean + rest; }
  __device__ __forceinline__ float normalise(float x) const {
    return fmaf(x - first_mean, rstd, -rest * rstd);
  }
};

// `sums` are those of the n deviations from first_mean and of their squares.
__device__ __forceinline__ RowNormaliser finish_statistics(int64_t n, float eps, bool centred,
                                                           float first_mean, float2 sums) {
  const float count = static_cast<float>(n), rest = centred ? sums.x / count : 0.f;
  const float variance = sums.y / count - rest * rest;
  // NOTE: < 0, not fmaxf, so that NaN stays NaN.
  return {first_mean, rest, 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps)};
}

}  // namespace torchweld
