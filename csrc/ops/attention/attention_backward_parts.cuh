// What the gradient of attention is built from: swizzled tiles in shared memory, and the operands
// of a tensor-core product as they are read from them, for 16-bit elements and for fp32.
#pragma once

#include <type_traits>

#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// Rows of kCols elements in chunks of 16 bytes. The chunks of a row change places so that the 8
// rows of an ldmatrix lie in different banks.
template <typename T, int kTileRows, int kCols>
struct SharedTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kCols * sizeof(T);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kGroups = kRowBytes / 32;  // the depth of one product is 32 bytes
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kChunks >= 2 && (kChunks & (kChunks - 1)) == 0);
  alignas(128) T s_data[kRows * kCols];

  static __device__ __forceinline__ int offset(int row, int chunk) {
    constexpr int kTurn = kChunks < 8 ? kChunks : 8;
    return row * kRowBytes + (chunk ^ (row / (8 / kTurn) % kTurn)) * 16;
  }

  // From the address of a byte to the one `bytes` further right in its row, a multiple of 16 that
  // has no bit in common with the column of the first. Multiples of 8 rows are added to it.
  static __device__ __forceinline__ uint32_t right_of(uint32_t s_byte, int bytes) {
    return (s_byte ^ (bytes % 128)) + bytes / 128 * 128;
  }

  // From the address of a byte in an even row to the one below it.
  static __device__ __forceinline__ uint32_t below_even(uint32_t s_byte) {
    return (kChunks < 8 ? s_byte : s_byte ^ 16) + kRowBytes;
  }
};

// The address that this lane gives to ldmatrix, for a left operand (m16 x 32 bytes) ...
template <typename Tile>
__device__ __forceinline__ uint32_t left_lane(uint32_t s_tile, int row, int group) {
  const int lane = threadIdx.x % kWarp;
  return s_tile + Tile::offset(row + lane % 16, 2 * group + lane / 16);
}

// ... and for two n8 tiles of a right operand.
template <typename Tile>
__device__ __forceinline__ uint32_t right_lane(uint32_t s_tile, int row, int group) {
  const int lane = threadIdx.x % kWarp;
  return s_tile + Tile::offset(row + lane % 8 + lane / 16 * 8, 2 * group + lane / 8 % 2);
}

// Operands of m16n8k16 products. A wide operand has its depth along the tile's rows.
template <typename T, bool kOnePass>
struct Operands {
  static constexpr int kDepth = 16;
  static constexpr int kWideTiles = 2;  // n8 tiles of a group of a wide right operand
  struct Left {
    uint32_t r[4];
  };
  struct Right {
    uint32_t r[2];
  };
  // Operands of the products whose depth is a head dim, of kScoreBytes each.
  static constexpr int kScoreBytes = 32;
  using ScoreLeft = Left;
  using ScoreRight = Right;

  static __device__ __forceinline__ void load_left(Left& to, uint32_t s_lane) {
    load_matrix_4(to.r, s_lane);
  }
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
  static __device__ __forceinline__ void load_wide_right(Right (&to)[kWideTiles], uint32_t s_lane,
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
    __device__ __forceinline__ void store(uint32_t s_to, int half) const {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_to), "r"(r[half]) : "memory");
    }
  };
  static __device__ __forceinline__ void from_results(Left& to, const Held* r_tiles) {
    to = {{r_tiles[0].r[0], r_tiles[0].r[1], r_tiles[1].r[0], r_tiles[1].r[1]}};
  }

  static __device__ __forceinline__ void mma(float (&d)[4], const Left& a, const Right& b) {
    mma_16816<T>(d, a.r, b.r[0], b.r[1]);
  }
};

// Operands of fp32: m16n8k8 products in TF32, one pass or three; scores to fp32 accuracy come from
// bf16 pieces, because an error in a score of 1000 counts as e^1000 does.
// NOTE: results hold depths 2t and 2t + 1 where a left operand wants t and t + 4. The order of the
// depths is free, so wide operands are read in that of the results.
template <bool kOnePass>
struct Operands<float, kOnePass> {
  static constexpr int kDepth = 8;
  static constexpr int kWideTiles = 1;
  template <int kCount>
  struct Split {
    uint32_t big[kCount], small[kCount], cross[kCount];
    __device__ __forceinline__ void set(int i, float x) {
      if constexpr (kOnePass) {
        big[i] = round_to_tf32(x);
      } else {
        const SplitTf32 parts(x);
        big[i] = parts.big;
        small[i] = parts.small;
        cross[i] = parts.cross;
      }
    }
    __device__ __forceinline__ void set(int i, uint32_t bits) { set(i, __uint_as_float(bits)); }
  };
  using Left = Split<4>;
  using Right = Split<2>;
  static constexpr int kScoreBytes = kOnePass ? 32 : 64;
  using ScoreLeft = std::conditional_t<kOnePass, Left, SplitFragment<4, true>>;
  using ScoreRight = std::conditional_t<kOnePass, Right, SplitFragment<2, true>>;

  static __device__ __forceinline__ void load_left(Left& to, uint32_t s_lane) {
    uint32_t r[4];
    load_matrix_4(r, s_lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) to.set(i, r[i]);
  }
  static __device__ __forceinline__ void load_right(Right (&to)[2], uint32_t s_lane) {
    uint32_t r[4];
    load_matrix_4(r, s_lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2].set(i % 2, r[i]);
  }
  static __device__ __forceinline__ void load_left(SplitFragment<4, true>& to, uint32_t s_lane) {
    float check;  // nobody asks
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t r[4];
      load_matrix_4(r, s_lane ^ (half * 32));
      to.set(2 * half, r[0], r[2], check);
      to.set(2 * half + 1, r[1], r[3], check);
    }
  }
  static __device__ __forceinline__ void load_right(SplitFragment<2, true> (&to)[2],
                                                    uint32_t s_lane) {
    float check;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t r[4];
      load_matrix_4(r, s_lane ^ (half * 32));
      to[0].set(half, r[0], r[1], check);
      to[1].set(half, r[2], r[3], check);
    }
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
  static __device__ __forceinline__ void load_wide_right(Right (&to)[kWideTiles], uint32_t s_lane,
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
    __device__ __forceinline__ void store(uint32_t s_to, int half) const {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(s_to), "f"(r[2 * half]),
                   "f"(r[2 * half + 1])
                   : "memory");
    }
  };
  // NOTE: an infinite result comes out as NaN here; the registers for more care would spill.
  static __device__ __forceinline__ void from_results(Left& to, const Held* r_tile) {
    constexpr int kOrder[] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = r_tile->r[kOrder[i]];
      to.big[i] = to.cross[i] = round_to_tf32(x);
      if (!kOnePass) to.small[i] = round_to_tf32(x - __uint_as_float(to.big[i]));
    }
  }

  // NOTE: tensor cores truncate when they add; a sum of its own for every product, added with
  // rounding, keeps the error of long sums that of fp32.
  static __device__ __forceinline__ void mma(float (&d)[4], const Left& a, const Right& b) {
    float r_part[4] = {};
    if constexpr (!kOnePass) {
      mma_1688(r_part, a.cross, b.small[0], b.small[1]);
      mma_1688(r_part, a.small, b.cross[0], b.cross[1]);
    }
    mma_1688(r_part, a.big, b.big[0], b.big[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += r_part[i];
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const SplitFragment<4, true>& a,
                                             const SplitFragment<2, true>& b) {
    mma_split(d, a, b);
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
  constexpr float kLog2e = 1.4426950408889634f;
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

}  // namespace torchweld
