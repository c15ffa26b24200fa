// What the register and the streaming kernels of a row softmax share: their arguments, masks, and
// how scores become exponents.
#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/score_scale.h"
#include "device/activation.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// Everything is visible, scale 1.
struct NoMask {
  static constexpr bool kMasked = false, kCapped = false;
  int64_t n;
  bool tiled(int64_t) const { return true; }
  __device__ __forceinline__ RowRange live_columns(int64_t) const {
    return {0, static_cast<int>(n)};
  }
  __device__ __forceinline__ LiveRange live(int64_t) const { return {0, n}; }
  __device__ __forceinline__ float scale() const { return 1.f; }
};

template <typename T>
struct RowArgs {
  const T* g_x;  // x, or y in the gradient
  const T* g_dy;
  T* g_y;  // y, or dx in the gradient
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t dy_row_stride;
  int64_t first_row;  // of this launch, where one grid can't hold all rows
};

// True when an access of `elems` columns from `first` on holds a live one.
template <typename Mask, typename Range, typename Column>
__device__ __forceinline__ bool touches(const Range& live, Column first, int elems) {
  if constexpr (!Mask::kMasked) return first < live.end;
  return first + elems > live.begin && first < live.end;
}

template <typename Range, typename Column>
__device__ __forceinline__ bool sees(const Range& live, Column column) {
  return column >= live.begin && column < live.end;
}

// An access of a streaming row as fp32 times `factor`, `hidden` where the mask hides.
template <typename Mask, typename T, int kElems>
__device__ __forceinline__ void unpack(float (&r_to)[kElems], const Vec<T, kElems>& from,
                                       const LiveRange& live, int64_t first, float factor,
                                       float hidden) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    r_to[j] = to_float(from.values[j]);
    if constexpr (Mask::kMasked) r_to[j] = sees(live, first + j) ? r_to[j] * factor : hidden;
  }
}

// Clears the columns that the mask hides in a result that is not finite elsewhere: 0 * NaN is NaN.
template <typename T, int kElems, typename Range, typename Column>
__device__ __forceinline__ void clear_hidden(Vec<T, kElems>& out, const Range& live, Column first) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    if (!sees(live, first + j)) out.values[j] = from_float<T>(0.f);
  }
}

// How scores become exponents: 2^((sign * x - max) * c). A scale of 0 multiplies the scores away,
// so that an infinite one is NaN as in torch.
template <typename T>
struct Exponent {
  float sign;
  float c;

  __device__ __forceinline__ explicit Exponent(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        c((scale == 0.f ? 1.f : fabsf(scale)) * kLog2e) {}

  // NOTE: results are 2^kBias times too large, which cancels in the division by their sum. It
  // keeps what would be subnormal in range of the one-instruction exponential; its rounding, 2^-19,
  // only suits 16-bit results.
  static constexpr float kBias = sizeof(T) == 2 ? 32.f : 0.f;

  __device__ __forceinline__ float operator()(float x, float max) const {
    if constexpr (sizeof(T) == 2) return exp2_approx_ftz(fmaf(x - max, c, kBias));
    return exp2_approx((x - max) * c);
  }

  // What sums against one maximum are multiplied with to be sums against another one.
  __device__ __forceinline__ float rescale(float from, float to) const {
    return exp2_approx((from - to) * c);
  }
};

// The same behind softcap and with a sink (CappedMask).
template <typename T>
struct CappedExponent : Exponent<T> {
  CappedScale scale;

  __device__ __forceinline__ CappedExponent(float scale, float softcap)
      : Exponent<T>(scale), scale(scale, softcap) {
    this->c = this->scale.c;
  }

  // Of sign * score. -inf becomes -1: what is hidden is hidden behind this.
  __device__ __forceinline__ float capped(float x) const {
    return scale.softcap > 0.f ? tanh_of<sizeof(T) == 4>(x * scale.cap) : x;
  }

  // What a row's exponentials against its maximum are multiplied with. A row of nothing but -inf is
  // NaN as in torch, but 0 beside a sink.
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

// -inf - (-inf) is NaN: a part that saw only -inf is compared with 0 instead and adds nothing.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// An access of a streaming row as the exponents want it, -inf where the mask hides.
template <typename Mask, typename T, int kElems, typename ExponentT>
__device__ __forceinline__ void unpack_scores(float (&r_to)[kElems], const Vec<T, kElems>& from,
                                              const LiveRange& live, int64_t first,
                                              const ExponentT& exponent) {
  unpack<Mask>(r_to, from, live, first, exponent.sign, -INFINITY);
  if constexpr (Mask::kCapped) {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (sees(live, first + j)) r_to[j] = exponent.capped(r_to[j]);
    }
  }
}

// Adds values, of which none is larger than `largest`, to a running (max, sum).
template <typename T, int kCount>
__device__ __forceinline__ void accumulate(MaxSum& part, float largest, const float (&r_x)[kCount],
                                           const Exponent<T>& exponent) {
  const float max = fmaxf(part.max, largest);
  part = {max, rescaled_sum(part, max, exponent)};
#pragma unroll
  for (int j = 0; j < kCount; ++j) part.sum += exponent(r_x[j], finite_max(max));
}

// The largest value that is not NaN, -inf where there is none.
template <int kCount>
__device__ __forceinline__ float largest(const float (&r_x)[kCount]) {
  float max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; ++j) max = fmaxf(max, r_x[j]);
  return max;
}

}  // namespace torchweld
