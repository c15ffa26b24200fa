// The soft cap of the scores, for attention and its backward.
#pragma once

#include <type_traits>

#include "attention/score_scale.h"
#include "device/activation.cuh"

namespace torchweld {

// Returns tanh(x). |x| must be at most SmallTanh<kTerms>::kMax. If x is NaN, the result is NaN.
template <int kTerms>
__device__ __forceinline__ float small_tanh(float x) {
  using Series = SmallTanh<kTerms>;
  const float square = x * x;
  float y = Series::term(kTerms - 1);
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) y = fmaf(square, y, Series::term(i));
  return y * x;
}

// Returns the largest |score|. Scores that are NaN don't count.
template <int kCount>
__device__ __forceinline__ float max_abs_of(const float (&r_s)[kCount]) {
  float largest = 0.f;
#pragma unroll
  for (const float score : r_s) largest = fmaxf(largest, fabsf(score));
  return largest;
}

// Replaces each score by tanh(score * cap). If kExact is true, the result has fp32 accuracy. In the
// backward, cap has the sign of scale.
// NOTE: the tanh of a score takes two slow instructions, and the exponential of a score takes only
// one. The scores of most models are far below the cap. If all scores of a warp are small, the warp
// uses a polynomial instead of tanh. If kOneWay is true, the warp always uses tanh. Kernels that
// lack registers for two code paths set kOneWay.
template <bool kExact, bool kOneWay = false, int kCount>
__device__ __forceinline__ void cap_scores(float (&r_s)[kCount], float cap) {
  if constexpr (!kExact && !kOneWay) {
    const float max_abs = max_abs_of(r_s) * fabsf(cap);
    const auto try_series = [&](auto terms) {
      if (!__all_sync(~0u, max_abs <= SmallTanh<terms.value>::kMax)) return false;
#pragma unroll
      for (float& score : r_s) score = small_tanh<terms.value>(score * cap);
      return true;
    };
    if (try_series(std::integral_constant<int, 4>()) ||
        try_series(std::integral_constant<int, 6>())) {
      return;
    }
  }
#pragma unroll
  for (float& score : r_s) score = tanh_of<kExact>(score * cap);
}

template <bool kExact, bool kOneWay = false, int kTiles, int kCols>
__device__ __forceinline__ void cap_scores(float (&r_s)[kTiles][kCols][4], float cap) {
  cap_scores<kExact, kOneWay>(reinterpret_cast<float (&)[kTiles * kCols * 4]>(r_s), cap);
}

}  // namespace torchweld
