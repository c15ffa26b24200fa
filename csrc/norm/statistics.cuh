// The statistics of a row as the norm's kernels have them, and what becomes of the row.
#pragma once

#include <cstdint>

#include "device/vec.cuh"

namespace torchweld {

// Not by one mean alone: what rounding left in the first one is `rest`, and with both taken off one
// after the other the result does not depend on |mean| / std (norm_kernels.cu).
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

// A vector's access as fp32, `otherwise` where there is no vector.
template <typename T, int kElems>
__device__ __forceinline__ void load_or(float (&r_to)[kElems], const T* g_vector, int64_t column,
                                        float otherwise) {
  Vec<T, kElems> in;
  if (g_vector != nullptr) in = load_vec<T, kElems>(g_vector + column);
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    r_to[j] = g_vector != nullptr ? to_float(in.values[j]) : otherwise;
  }
}

// y[column ...] = normalised x * scale + shift.
template <typename T, int kElems>
__device__ __forceinline__ void store_normalised(const void* scale, const void* shift, T* g_y,
                                                 int64_t column, const Vec<T, kElems>& x,
                                                 const RowNormaliser& s) {
  float r_scale[kElems], r_shift[kElems];
  load_or(r_scale, static_cast<const T*>(scale), column, 1.f);
  load_or(r_shift, static_cast<const T*>(shift), column, 0.f);
  Vec<T, kElems> out;
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    out.values[j] = from_float<T>(fmaf(s.normalise(to_float(x.values[j])), r_scale[j], r_shift[j]));
  }
  store_vec(g_y + column, out);
}

}  // namespace torchweld
