// The exponentials of scalar_attention: e = exp(q k - max_j q k), in two ways.
//
// A row's largest score is q * max(k) or q * min(k), so every exponential is taken against its
// final maximum at once. Rows whose scores span little (spans_little) are computed in base 2 from
// one multiply-add, scale * k + shift, with a whole number as shift: by the exponential unit, or by
// rounding to a whole number and a polynomial. All other rows, those of inf and NaN included, take
// a difference from the maximum first.
// Source: Cody and Waite, "Software Manual for the Elementary Functions", 1980 (the reduction).
#pragma once

#include "device/reduce.cuh"

namespace torchweld {

// The smallest and the largest key; NaN where any key is.
struct KeyRange {
  float min, max;
};

// What a row brings to its exponentials.
struct RowExponent {
  float scale, shift;
};

constexpr float kLog2OfE = 1.4426950408889634f;

__device__ __forceinline__ float top_key(float q, KeyRange keys) {
  return q >= 0.f ? keys.max : keys.min;
}

// True where the fast exponentials are exact in their reduction and stay normal numbers.
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

// What a row's exponentials are to be multiplied by: a fast row is up to half a power of two off.
template <bool kFast>
__device__ __forceinline__ float row_factor(float q, KeyRange keys) {
  if constexpr (!kFast) return 1.f;
  const RowExponent row = row_exponent<true>(q, keys);
  return exp2_approx_ftz(-fmaf(row.scale, top_key(q, keys), row.shift));
}

// NOTE: exponentials below 2^-126 of the row's largest become 0, which one instruction does; their
// share of a sum is below its rounding.
template <bool kFast>
__device__ __forceinline__ float exponential(RowExponent row, float k) {
  if constexpr (kFast) return exp2_approx_ftz(fmaf(row.scale, k, row.shift));
  // Halves: the difference of two finite keys is finite.
  const float below = fmaf(0.5f, k, -row.shift);
  return exp2_approx_ftz(row.scale * below * (2.f * kLog2OfE));
}

// The same for fast rows by the multiply-add pipe: 2^n * 2^f with |f| <= 1/2, 2^f to 2^-22.
__device__ __forceinline__ float exponential_polynomial(RowExponent row, float k) {
  // A sum near this number is rounded to a whole one, which its low bits hold.
  constexpr float kWhole = 12582912.f;  // 1.5 * 2^23
  const float anchor = kWhole + row.shift;
  const float whole = fmaf(row.scale, k, anchor);
  const float f = fmaf(row.scale, k, anchor - whole);  // exact but for its one rounding
  float y = 0.0013264728477224708f;
  y = fmaf(y, f, 0.009671512991189957f);
  y = fmaf(y, f, 0.05550733581185341f);
  y = fmaf(y, f, 0.24022242426872253f);
  y = fmaf(y, f, 0.6931470036506653f);
  y = fmaf(y, f, 1.f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(whole) << 23));
}

}  // namespace torchweld
