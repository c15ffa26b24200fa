// Online softmax over the fragments of a score tile.
//
// The scores form a matrix of kTiles * 16 rows and kCols * 8 columns, in the layout of m16n8's C.
// A thread holds rows g and g + 8 of every 16 rows, where g is lane / 4, and two neighbouring
// columns of every 8 columns. Probabilities are 2^((s - max) * c).
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include <climits>

#include "attention/cap.cuh"
#include "device/reduce.cuh"

namespace torchweld {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The state of a row: the largest score so far, and the sum of those probabilities of the row that
// this thread holds.
struct OnlineRow {
  float max;
  float sum;
};

// NOTE: this function replaces default member initialisers of OnlineRow. nvcc 13.0 would run such
// initialisers only for the first row of a 2-D array.
template <int kTiles>
__device__ __forceinline__ void start(OnlineRow (&rows)[kTiles][2]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    rows[tile][0] = rows[tile][1] = {-INFINITY, 0.f};
  }
}

// Replaces the scores of a thread in one row of m16n8 tiles by probabilities. `half` is 0 for row g
// and 1 for row g + 8. The maximum of the row rises from `before` to `max`. The accumulators of O
// must be multiplied by `factor`. `offset` is added to every score. If kFtz is true, subnormal
// probabilities become 0. Returns the sum of the probabilities, in the order of the columns.
template <bool kFtz, int kCols>
__device__ __forceinline__ float exponentiate(float (&r_s)[kCols][4], int half, float before,
                                              float max, float c, float& factor,
                                              float offset = 0.f) {
  constexpr auto exp2 = kFtz ? exp2_approx_ftz : exp2_approx;
  // -inf - (-inf) is NaN. Therefore a row uses 0 as its maximum if all scores of the row so far are
  // -inf. The sum of the row stays 0.
  const float top = max == -INFINITY ? 0.f : max;
  // NOTE: s * c - shift is one FMA. All scores of the row and `factor` use the same rounded
  // `shift`, so the rounding error of `shift` cancels. For huge scores, however, this error is so
  // large that 2^error overflows. Therefore the code first subtracts `top` from huge scores. inf -
  // inf gives NaN, as in torch.
  const float own_top = top - offset;
  float shift = __fmul_rn(own_top, c);
  float rise = __fmul_rn(before, c) - __fmul_rn(top, c);
  if (!(fabsf(shift) < 0x1p14f)) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      r_s[j][2 * half] -= own_top;
      r_s[j][2 * half + 1] -= own_top;
    }
    shift = 0.f;
    rise = (before - top) * c;
  }
  factor = exp2(rise);
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) r_s[j][i] = exp2(fmaf(r_s[j][i], c, -shift));
    sum += r_s[j][2 * half] + r_s[j][2 * half + 1];
  }
  return sum;
}

// Returns the maximum of a thread's scores in one row, and of `max`.
template <int kCols>
__device__ __forceinline__ float max_of_row(const float (&r_s)[kCols][4], int half, float max) {
#pragma unroll
  for (int j = 0; j < kCols; ++j) max = fmaxf(max, fmaxf(r_s[j][2 * half], r_s[j][2 * half + 1]));
  return max;
}

// Returns the maximum that a row subtracts from its scores. `max` is the largest score so far. If
// kLazy is true, a row keeps its old maximum `before` as long as its probabilities are at most 2^8,
// so that the factor of the accumulators is often 1.
template <bool kLazy>
__device__ __forceinline__ float next_max(float before, float max, float c) {
  return kLazy && (max - before) * c <= 8.f ? before : max;
}

// Replaces scores by probabilities. The caller must then multiply the accumulators of O by
// `factor`. If kOffset is true, `offsets` are first added to the thread's scores of each row.
template <bool kFtz, bool kLazy = false, bool kOffset = false, int kTiles, int kCols>
__device__ __forceinline__ void online_softmax(float (&r_s)[kTiles][kCols][4],
                                               OnlineRow (&rows)[kTiles][2],
                                               float (&factor)[kTiles][2], float c,
                                               const float (*offsets)[2] = nullptr) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OnlineRow& row = rows[tile][half];
      float top, offset = 0.f;
      if constexpr (kOffset) {
        offset = offsets[tile][half];
        top = fmaxf(max_of_row(r_s[tile], half, -INFINITY) + offset, row.max);
      } else {
        top = max_of_row(r_s[tile], half, row.max);
      }
      const float max = next_max<kLazy>(row.max, quad_max(top), c);
      const float sum =
          exponentiate<kFtz>(r_s[tile], half, row.max, max, c, factor[tile][half], offset);
      row.sum = fmaf(row.sum, factor[tile][half], sum);
      row.max = max;
    }
  }
}

// Softmax without a running maximum, for small soft-capped scores. `exponent` is a SmallExponent,
// which converts a score into its exponent. The maxima of the rows must be 0 or more, and they
// don't change. If `hides` is true, r_s first receives the exponents, and hide() then sets the
// exponents of hidden keys to -inf.
template <int kTiles, int kCols, class Exponent, class Hide>
__device__ __forceinline__ void online_softmax_of_small(float (&r_s)[kTiles][kCols][4],
                                                        OnlineRow (&rows)[kTiles][2], float c,
                                                        const Exponent& exponent, bool hides,
                                                        const Hide& hide) {
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = rows[tile][half].max * c;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) sum += body(r_s[tile][j][i], shift);
        }
        rows[tile][half].sum += sum;
      }
    }
  };
  if (!hides) {
    return for_each(
        [&](float& score, float shift) { return score = exp2_approx_ftz(exponent(score, shift)); });
  }
  for_each([&](float& score, float shift) {
    score = exponent(score, shift);
    return 0.f;
  });
  hide();
  for_each([](float& score, float) { return score = exp2_approx_ftz(score); });
}

// Computes r_out *= factor.
template <int kTiles, int kCols>
__device__ __forceinline__ void rescale(float (&r_out)[kTiles][kCols][4],
                                        const float (&factor)[kTiles][2]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r_out[tile][n][i] *= factor[tile][i / 2];
    }
  }
}

// In each row, hides column min(first_end + row, last_end) and all later columns.
template <int kTiles, int kCols>
__device__ __forceinline__ void hide_columns(float (&r_s)[kTiles][kCols][4], int first_end,
                                             int last_end) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min(first_end + tile * 16 + half * 8 + g, last_end);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = r_s[tile][j][2 * half + i];
          score = j * 8 + 2 * t + i < end ? score : -INFINITY;
        }
      }
    }
  }
}

inline constexpr int kSeesNothing = INT_MAX;  // the first key of a row that sees no key

// Keeps the columns [begin[row] - from, end[row] - from) of each row. Hides all other columns.
template <int kTiles, int kCols>
__device__ __forceinline__ void hide_columns(float (&r_s)[kTiles][kCols][4], const int* begin,
                                             const int* end, int from) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + half * 8 + g;
      const unsigned columns = end[row] > begin[row] ? end[row] - begin[row] : 0;
      const int column_offset = 2 * t - (begin[row] - from);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = r_s[tile][j][2 * half + i];
          score = static_cast<unsigned>(column_offset + j * 8 + i) < columns ? score : -INFINITY;
        }
      }
    }
  }
}

}  // namespace torchweld
