// Arguments, masks and exponents of the row softmax kernels.
#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/score_scale.h"
#include "device/activation.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// The mask for ops without a mask: all columns are live, and the scale is 1.
struct NoMask {
  static constexpr bool kMasked = false, kCapped = false;
  int64_t n;
  bool tiled(int64_t) const { return true; }
  __device__ __forceinline__ KeyRange32 live_columns(int64_t) const {
    return {0, static_cast<int>(n)};
  }
  __device__ __forceinline__ KeyRange live(int64_t) const { return {0, n}; }
  __device__ __forceinline__ float scale() const { return 1.f; }
};

template <typename T>
struct RowArgs {
  const T* g_x;  // address of x in the forward, and of y in the backward
  const T* g_dy;
  T* g_y;  // address of y in the forward, and of dx in the backward
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t dy_row_stride;
  int64_t first_row;  // the index of the first row of this launch
};

// Whether columns [first, first + elems) include a live column.
template <typename Mask, typename Range, typename Column>
__device__ __forceinline__ bool touches(const Range& live, Column first, int elems) {
  if constexpr (!Mask::kMasked) return first < live.end;
  return first + elems > live.begin && first < live.end;
}

template <typename Range, typename Column>
__device__ __forceinline__ bool sees(const Range& live, Column column) {
  return column >= live.begin && column < live.end;
}

// Converts an access to fp32. If there is a mask, also multiplies live columns by `factor` and sets
// masked columns to `hidden`.
template <typename Mask, typename T, int kElems>
__device__ __forceinline__ void unpack(float (&r_to)[kElems], const Vec<T, kElems>& from,
                                       const KeyRange& live, int64_t first, float factor,
                                       float hidden) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    r_to[j] = to_float(from.values[j]);
    if constexpr (Mask::kMasked) r_to[j] = sees(live, first + j) ? r_to[j] * factor : hidden;
  }
}

// Sets masked columns to 0. A caller uses this function if a result of the row is not finite.
// Masked columns then hold 0 * NaN, which is NaN.
template <typename T, int kElems, typename Range, typename Column>
__device__ __forceinline__ void clear_hidden(Vec<T, kElems>& out, const Range& live, Column first) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    if (!sees(live, first + j)) out.values[j] = from_float<T>(0.f);
  }
}

// The exponential of a score: 2^((sign * x - max) * c). If the scale is 0, scores are still
// multiplied by 0, so that an infinite score gives NaN, as in torch.
template <typename T>
struct Exponent {
  float sign;
  float c;

  __device__ __forceinline__ explicit Exponent(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        c((scale == 0.f ? 1.f : fabsf(scale)) * kLog2e) {}

  // NOTE: operator() returns results that are too large by a factor of 2^kBias. The division by the
  // sum of these results cancels the factor. exp2_approx_ftz is one instruction that flushes
  // subnormal results to 0, and the factor keeps results above the subnormal range. The instruction
  // has an error of 2^-19, which is accurate enough only for 16-bit results.
  static constexpr float kBias = sizeof(T) == 2 ? 32.f : 0.f;

  __device__ __forceinline__ float operator()(float x, float max) const {
    if constexpr (sizeof(T) == 2) return exp2_approx_ftz(fmaf(x - max, c, kBias));
    return exp2_approx((x - max) * c);
  }

  // Returns the factor that converts a sum of exponentials relative to maximum `from` into a sum
  // relative to maximum `to`.
  __device__ __forceinline__ float rescale(float from, float to) const {
    return exp2_approx((from - to) * c);
  }
};

// The version of Exponent with a soft cap and a sink (MaskKind::kCapped).
template <typename T>
struct CappedExponent : Exponent<T> {
  CappedScale scale;

  __device__ __forceinline__ CappedExponent(float scale, float softcap)
      : Exponent<T>(scale), scale(scale, softcap) {
    this->c = this->scale.c;
  }

  // Applies the soft cap to x = sign * score. The cap maps -inf to -1. Therefore callers set masked
  // columns to -inf after this function.
  __device__ __forceinline__ float capped(float x) const {
    return scale.softcap > 0.f ? tanh_of<sizeof(T) == 4>(x * scale.cap) : x;
  }

  // Returns the factor that normalises the exponentials of a row. If all scores of a row are -inf,
  // the results of the row are NaN without a sink, as in torch, and 0 with a sink.
  __device__ __forceinline__ FinishedRow finish(const MaxSum& total, float sink) const {
    constexpr float kUnit = 1.f / (int64_t{1} << static_cast<int>(Exponent<T>::kBias));
    FinishedRow row = finish_row(scale, total.max, total.sum * kUnit, sink);
    row.factor *= kUnit;
    return row;
  }
};

template <typename T, typename Mask>
__device__ __forceinline__ auto exponent_of(const Mask& mask) {
  if constexpr (Mask::kCapped) {
    return CappedExponent<T>(mask.scale(), mask.mask.softcap);
  } else {
    return Exponent<T>(mask.scale());
  }
}

// Returns 0 for a maximum of -inf, and `max` otherwise. Thus values of -inf add 0 to the sum.
// Relative to a maximum of -inf, they would add NaN, because -inf - (-inf) is NaN.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// Converts the scores of one vector load to arguments of `exponent`. Masked columns become -inf.
template <typename Mask, typename T, int kElems, typename ExponentT>
__device__ __forceinline__ void unpack_scores(float (&r_to)[kElems], const Vec<T, kElems>& from,
                                              const KeyRange& live, int64_t first,
                                              const ExponentT& exponent) {
  unpack<Mask>(r_to, from, live, first, exponent.sign, -INFINITY);
  if constexpr (Mask::kCapped) {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (sees(live, first + j)) r_to[j] = exponent.capped(r_to[j]);
    }
  }
}

// Adds values to a running (max, sum). `largest` must be at least the largest of the values.
template <typename ExponentOf, int kCount>
__device__ __forceinline__ void accumulate(MaxSum& running, float largest,
                                           const float (&r_x)[kCount], const ExponentOf& exponent) {
  const float max = fmaxf(running.max, largest);
  running = {max, rescaled_sum(running, max, exponent)};
#pragma unroll
  for (int j = 0; j < kCount; ++j) running.sum += exponent(r_x[j], finite_max(max));
}

// Returns the largest of the values that are not NaN, or -inf if all values are NaN.
template <int kCount>
__device__ __forceinline__ float largest(const float (&r_x)[kCount]) {
  float max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; ++j) max = fmaxf(max, r_x[j]);
  return max;
}

}  // namespace torchweld
