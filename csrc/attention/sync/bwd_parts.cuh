// What the gradient of attention is built from: the operands of a tensor-core product as they are
// read from tiles in shared memory, for 16-bit elements and for TF32, and what becomes of results.
#pragma once

#include <type_traits>

#include "attention/tile.cuh"
#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// to(i, j) += a[i] @ b_j for kM left operands and kGroups times kN right ones, which load(b, group)
// reads.
template <typename Ops, int kGroups, int kN, int kM, typename Load, typename To>
__device__ __forceinline__ void multiply_operands(const typename Ops::Left (&a)[kM],
                                                  const Load& load, const To& to) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    typename Ops::Right b[kN];
    load(b, group);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) Ops::mma(to(i, group * kN + j), a[i], b[j]);
    }
    // NOTE: without it the compiler mixes the turns of this loop and spills.
    if constexpr (kN == 1) __syncwarp();
  }
}

// Operands of m16n8k16 products. A wide operand has its depth along the tile's rows.
template <typename T>
struct Operands {
  static constexpr int kDepth = 16;
  static constexpr int k2CtaTiles = 2;  // n8 tiles of a group of a wide right operand
  struct Left {
    uint32_t r[4];
  };
  struct Right {
    uint32_t r[2];
  };

  template <typename Tile>
  static __device__ __forceinline__ void load_left(Left& to, uint32_t s_lane) {
    load_matrix_4(to.r, s_lane);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_right(Right (&to)[2], uint32_t s_lane) {
    uint32_t r[4];
    load_matrix_4(r, s_lane);
    to[0] = {{r[0], r[1]}};
    to[1] = {{r[2], r[3]}};
  }

  template <typename Tile>
  static __device__ __forceinline__ uint32_t wide_left_lane(uint32_t s_tile, int col) {
    return right_lane<Tile>(s_tile, 0, col / kDepth);
  }
  template <typename Tile>
  static __device__ __forceinline__ uint32_t wide_right_lane(uint32_t s_tile, int col) {
    return left_lane<Tile>(s_tile, 0, col / kDepth);
  }
  // Columns [16 * tile, 16 * tile + 16) as rows of the product; `bytes` further down.
  template <typename Tile>
  static __device__ __forceinline__ void load_wide_left(Left& to, uint32_t s_lane, int bytes,
                                                        int tile) {
    load_matrix_4_transposed(to.r, Tile::right_of(s_lane, tile * 32) + bytes);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_wide_right(Right (&to)[k2CtaTiles], uint32_t s_lane,
                                                         int bytes, int group) {
    uint32_t r[4];
    load_matrix_4_transposed(r, Tile::right_of(s_lane, group * 32) + bytes);
    to[0] = {{r[0], r[1]}};
    to[1] = {{r[2], r[3]}};
  }

  // A result tile (m16 x n8) as it waits for the product that it is an operand of: rows g and g
  // + 8.
  struct Held {
    uint32_t r[2];
    __device__ __forceinline__ void set(const float (&r_tile)[4]) {
      r[0] = pack_pair<T>(r_tile[0], r_tile[1]);
      r[1] = pack_pair<T>(r_tile[2], r_tile[3]);
    }
    template <typename Tile>
    __device__ __forceinline__ void store(uint32_t s_to, int half) const {
      store_word(s_to, r[half]);
    }
  };
  static __device__ __forceinline__ void from_results(Left& to, const Held* r_tiles) {
    to = {{r_tiles[0].r[0], r_tiles[0].r[1], r_tiles[1].r[0], r_tiles[1].r[1]}};
  }

  static __device__ __forceinline__ void mma(float (&d)[4], const Left& a, const Right& b) {
    mma_16816<T>(d, a.r, b.r[0], b.r[1]);
  }

  template <int kGroups, int kN, int kM, typename Load, typename To>
  static __device__ __forceinline__ void multiply(const Left (&a)[kM], bool /*handles_non_finite*/,
                                                  const Load& load, const To& to) {
    multiply_operands<Operands, kGroups, kN>(a, load, to);
  }
};

// Operands of fp32 in one pass of TF32: m16n8k8 products.
// NOTE: results hold depths 2t and 2t + 1 where a left operand wants t and t + 4. The order of the
// depths is free, so wide operands are read in that of the results.
template <>
struct Operands<float> {
  static constexpr int kDepth = 8;
  static constexpr int k2CtaTiles = 1;
  template <int kCount>
  struct Rounded {
    uint32_t r[kCount];
    __device__ __forceinline__ void set(int i, uint32_t bits) {
      r[i] = round_to_tf32(__uint_as_float(bits));
    }
  };
  using Left = Rounded<4>;
  using Right = Rounded<2>;

  template <typename Tile>
  static __device__ __forceinline__ void load_left(Left& to, uint32_t s_lane) {
    uint32_t r[4];
    load_matrix_4(r, s_lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) to.set(i, r[i]);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_right(Right (&to)[2], uint32_t s_lane) {
    uint32_t r[4];
    load_matrix_4(r, s_lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2].set(i % 2, r[i]);
  }

  template <typename Tile>
  static __device__ __forceinline__ uint32_t wide_right_lane(uint32_t s_tile, int col) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const uint32_t s_col = s_tile + g % 4 * 4;
    const int chunk = col / 4 + g / 4;
    return s_col + Tile::offset(2 * t, chunk);
  }
  template <typename Tile>
  static __device__ __forceinline__ uint32_t wide_left_lane(uint32_t s_tile, int col) {
    return wide_right_lane<Tile>(s_tile, col);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_wide_left(Left& to, uint32_t s_lane, int bytes,
                                                        int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t s_word = Tile::right_of(s_lane, tile * 64 + half * 32);
      to.set(half, load_word(s_word + bytes));
      to.set(2 + half, load_word(Tile::below_even(s_word) + bytes));
    }
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_wide_right(Right (&to)[k2CtaTiles], uint32_t s_lane,
                                                         int bytes, int group) {
    const uint32_t s_word = Tile::right_of(s_lane, group * 32);
    to[0].set(0, load_word(s_word + bytes));
    to[0].set(1, load_word(Tile::below_even(s_word) + bytes));
  }

  struct Held {
    float r[4];
    __device__ __forceinline__ void set(const float (&r_tile)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = r_tile[i];
    }
    template <typename Tile>
    __device__ __forceinline__ void store(uint32_t s_to, int half) const {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(s_to), "f"(r[2 * half]),
                   "f"(r[2 * half + 1])
                   : "memory");
    }
  };
  static __device__ __forceinline__ void from_results(Left& to, const Held* r_tile) {
    constexpr int kOrder[] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) to.r[i] = round_to_tf32(r_tile->r[kOrder[i]]);
  }

  // NOTE: tensor cores truncate when they add; a sum of its own for every product, added with
  // rounding, keeps the error of long sums that of fp32.
  static __device__ __forceinline__ void mma(float (&d)[4], const Left& a, const Right& b) {
    float r_part[4] = {};
    mma_1688(r_part, a.r, b.r[0], b.r[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += r_part[i];
  }

  template <int kGroups, int kN, int kM, typename Load, typename To>
  static __device__ __forceinline__ void multiply(const Left (&a)[kM], bool /*handles_non_finite*/,
                                                  const Load& load, const To& to) {
    multiply_operands<Operands, kGroups, kN>(a, load, to);
  }
};

// Tiles from kFrom of strips of 16 rows of result tiles, times `scale`, as rows from `row` and
// columns from `col` of g_to (rows, cols): rows below `first` become 0, rows from `end` are not
// written. NOTE: a recursion over the tiles; of long nested loops the compiler leaves one rolled
// and the sums in local memory.
template <int kFrom, typename T, int kStrips, int kTiles>
__device__ __forceinline__ void store_results(T* g_to, const float (&r_tiles)[kStrips][kTiles][4],
                                              float scale, int row, int first, int end, int col,
                                              int cols) {
  const int lane_row = row + threadIdx.x % kWarp / 4, lane_col = col + threadIdx.x % 4 * 2;
  const int left = cols - lane_col - kFrom * 8;
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int at = lane_row + i * 8;
    if (at < end && left > 0) {
      T* g_pair = g_to + static_cast<int64_t>(at) * cols + lane_col + kFrom * 8;
      const T x = from_float<T>(at < first ? 0.f : r_tiles[i / 2][kFrom][i % 2 * 2] * scale);
      const T y = from_float<T>(at < first ? 0.f : r_tiles[i / 2][kFrom][i % 2 * 2 + 1] * scale);
      if (cols % 2 == 0) {
        store_vec<T, 2>(g_pair, {x, y});
      } else {
        g_pair[0] = x;
        if (left > 1) g_pair[1] = y;
      }
    }
  }
  if constexpr (kFrom + 1 < kTiles) {
    store_results<kFrom + 1>(g_to, r_tiles, scale, row, first, end, col, cols);
  }
}

// fp16 probabilities are kept this many powers of two too large, so that the small ones stay
// normal.
template <typename T>
constexpr int kProbabilityShift = std::is_same_v<T, __half> ? 15 : 0;

// e^x from the exponent that BackwardArgs' factors give: already in base 2, shifted by
// kProbabilityShift, where the result is rounded to 16 bits.
// NOTE: in fp32 the change of base comes after the subtraction, whose result is small; before it,
// the rounding of the factor would count |lse| times. The largest probability is held at 1: the
// rounding of a score of 1e30 could make it inf.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) return exp2_approx_ftz(min_or_nan(x, kProbabilityShift<T>));
  return exp2_approx(min_or_nan(x, 0.f) * kLog2e);
}

// A counter that the blocks of a grid pass on.
__device__ __forceinline__ int load_acquire(const int* g_from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int* g_to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(g_to), "r"(value) : "memory");
}

__device__ __forceinline__ void increment_release(int* g_to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(g_to) : "memory");
}

}  // namespace torchweld
