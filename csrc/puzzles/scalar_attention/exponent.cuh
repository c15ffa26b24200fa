// The two ways to compute the exponentials of scalar_attention, e = exp(q k - max_j q k).
//
// The largest score of a row is q * max(k) or q * min(k), so it is known before the sweep. If the
// scores of a row have a small range (spans_little), the exponential is computed as
//   2^(scale * k + shift), with an integer shift
// The exponent needs one FMA. Then either the exponential unit computes the power of two, or the
// code rounds the exponent to an integer and uses a polynomial. In all other rows, including rows
// with inf and NaN, the maximum is first subtracted from the score.
// Source: Cody and Waite, "Software Manual for the Elementary Functions", 1980 (range reduction).
#pragma once

#include "device/reduce.cuh"

namespace torchweld {

// The smallest and the largest key. Both are NaN if any key is NaN.
struct KeyRange {
  float min, max;
};

// The exponent of a row's exponentials: scale * k + shift.
struct RowExponent {
  float scale, shift;
};

constexpr float kLog2OfE = 1.4426950408889634f;

__device__ __forceinline__ float top_key(float q, KeyRange keys) {
  return q >= 0.f ? keys.max : keys.min;
}

// Whether a row allows the fast exponentials. In such a row, their range reduction is exact, and
// they are normal numbers.
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

// Returns the factor that makes a row's exponentials relative to the exact maximum of scale * k.
// With kFast, -shift is this maximum rounded to an integer. Therefore the exponentials
// 2^(scale * k + shift) are up to sqrt(2) times too large or too small. Without kFast, the factor
// is 1.
template <bool kFast>
__device__ __forceinline__ float row_factor(float q, KeyRange keys) {
  if constexpr (!kFast) return 1.f;
  const RowExponent row = row_exponent<true>(q, keys);
  return exp2_approx_ftz(-fmaf(row.scale, top_key(q, keys), row.shift));
}

// NOTE: exponentials below 2^-126 times the row's largest exponential are flushed to 0. They are
// smaller than the rounding error of the sum.
template <bool kFast>
__device__ __forceinline__ float exponential(RowExponent row, float k) {
  if constexpr (kFast) return exp2_approx_ftz(fmaf(row.scale, k, row.shift));
  // Halve the keys, so that the difference of two finite keys is finite.
  const float below = fmaf(0.5f, k, -row.shift);
  return exp2_approx_ftz(row.scale * below * (2.f * kLog2OfE));
}

// Computes exponential<true> on the FMA pipe, as 2^n * 2^f with an integer n and |f| <= 1/2. A
// polynomial computes 2^f with an error of 2^-22.
__device__ __forceinline__ float exponential_polynomial(RowExponent row, float k) {
  // Adding kRound rounds a number to an integer. The low bits of the sum hold this integer.
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23
  const float anchor = kRound + row.shift;
  const float rounded = fmaf(row.scale, k, anchor);
  // The subtraction anchor - rounded is exact, so f is rounded only once.
  const float f = fmaf(row.scale, k, anchor - rounded);
  float y = 0.0013264728477224708f;
  y = fmaf(y, f, 0.009671512991189957f);
  y = fmaf(y, f, 0.05550733581185341f);
  y = fmaf(y, f, 0.24022242426872253f);
  y = fmaf(y, f, 0.6931470036506653f);
  y = fmaf(y, f, 1.f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}

}  // namespace torchweld
