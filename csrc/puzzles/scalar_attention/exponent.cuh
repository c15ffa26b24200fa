// The two ways to compute the exponentials of scalar_attention, e = exp(q k - max_j q k).
//
// The largest score of a row is q * max(k) or q * min(k), so the final maximum is known in advance.
// If the scores of a row have a small range (spans_little), the exponential is computed as 2^(scale
// * k + shift) with an integer shift. This needs one FMA and either the exponential unit, or
// rounding to an integer and a polynomial. All other rows, including those with inf and NaN,
// subtract the maximum first.
// Source: Cody and Waite, "Software Manual for the Elementary Functions", 1980 (the reduction).
#pragma once

#include "device/reduce.cuh"

namespace torchweld {

// The smallest and the largest key. Both are NaN if any key is NaN.
struct KeyRange {
  float min, max;
};

// The exponent of a row: scale * k + shift.
struct RowExponent {
  float scale, shift;
};

constexpr float kLog2OfE = 1.4426950408889634f;

__device__ __forceinline__ float top_key(float q, KeyRange keys) {
  return q >= 0.f ? keys.max : keys.min;
}

// Whether the fast exponentials of a row have an exact range reduction and normal results.
__device__ __forceinline__ bool spans_little(float q, KeyRange keys) {
  const float scale = q * kLog2OfE;
  return fabsf(scale) * (keys.max - keys.min) <= 100.f &&
         fabsf(scale * top_key(q, keys)) <= 1048576.f;
}

template <bool kFast>
__device__ __forceinline__ RowExponent row_exponent(float q, KeyRange keys) {
  if constexpr (kFast) {
    const float scale = q * kLog2OfE;
    return {scale, -rintf(scale * top_key(q, keys))};
  }
  return {q, 0.5f * top_key(q, keys)};
}

// The factor that corrects the exponentials of a row: the integer shift of a fast row is off by up
// to half a power of two.
template <bool kFast>
__device__ __forceinline__ float row_factor(float q, KeyRange keys) {
  if constexpr (!kFast) return 1.f;
  const RowExponent row = row_exponent<true>(q, keys);
  return exp2_approx_ftz(-fmaf(row.scale, top_key(q, keys), row.shift));
}

// NOTE: exponentials below 2^-126 of the row's largest exponential are flushed to 0. They are
// smaller than the rounding error of the sum.
template <bool kFast>
__device__ __forceinline__ float exponential(RowExponent row, float k) {
  if constexpr (kFast) return exp2_approx_ftz(fmaf(row.scale, k, row.shift));
  // The keys are halved, so that the difference of two finite keys is finite.
  const float below = fmaf(0.5f, k, -row.shift);
  return exp2_approx_ftz(row.scale * below * (2.f * kLog2OfE));
}

// Computes exponential<true> on the FMA pipe, as 2^n * 2^f with |f| <= 1/2. 2^f has an error of
// 2^-22.
__device__ __forceinline__ float exponential_polynomial(RowExponent row, float k) {
  // Adding kRound rounds to an integer, which is then in the low bits of the sum.
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23
  const float anchor = kRound + row.shift;
  const float rounded = fmaf(row.scale, k, anchor);
  const float f = fmaf(row.scale, k, anchor - rounded);  // exact except for one rounding
  float y = 0.0013264728477224708f;
  y = fmaf(y, f, 0.009671512991189957f);
  y = fmaf(y, f, 0.05550733581185341f);
  y = fmaf(y, f, 0.24022242426872253f);
  y = fmaf(y, f, 0.6931470036506653f);
  y = fmaf(y, f, 1.f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}

}  // namespace torchweld
