// Parts of attention's backward on mma.sync: loads of mma operands from tiles in shared memory
// (16-bit elements and TF32), stores of results, and the dQ semaphores.
#pragma once

#include <type_traits>

#include "attention/tile.cuh"
#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// Computes to(i, j) += a[i] @ b_j for kM left operands and kGroups * kN right operands. load(b,
// group) loads kN right operands.
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
    // NOTE: without this barrier, the compiler interleaves the iterations, and registers spill.
    if constexpr (kN == 1) __syncwarp();
  }
}

// The operands of m16n8k16. Functions with `mn` in their name load MN-major operands: the K
// dimension of the mma is the row index of the tile.
template <typename T>
struct Operands {
  static constexpr int kDepth = 16;
  static constexpr int kMnTiles = 2;  // number of n8 tiles in an MN-major right operand
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
  static __device__ __forceinline__ uint32_t mn_left_lane(uint32_t s_tile, int col) {
    return right_lane<Tile>(s_tile, 0, col / kDepth);
  }
  template <typename Tile>
  static __device__ __forceinline__ uint32_t mn_right_lane(uint32_t s_tile, int col) {
    return left_lane<Tile>(s_tile, 0, col / kDepth);
  }
  // Loads a left operand: the transpose of columns [16 * tile, 16 * tile + 16) of the tile in
  // shared memory. `bytes` is the offset of the first row to load.
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_left(Left& to, uint32_t s_lane, int bytes,
                                                      int tile) {
    load_matrix_4_transposed(to.r, Tile::right_of(s_lane, tile * 32) + bytes);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_right(Right (&to)[kMnTiles], uint32_t s_lane,
                                                       int bytes, int group) {
    uint32_t r[4];
    load_matrix_4_transposed(r, Tile::right_of(s_lane, group * 32) + bytes);
    to[0] = {{r[0], r[1]}};
    to[1] = {{r[2], r[3]}};
  }

  // A result tile (m16 x n8) that is kept as an operand of a later product. r[0] has row lane / 4
  // of the tile, and r[1] has row lane / 4 + 8.
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

  template <int kGroups, int kN, bool /*kMirrored*/ = false, int kM, typename Load, typename To>
  static __device__ __forceinline__ void multiply(const Left (&a)[kM], bool /*handles_non_finite*/,
                                                  const Load& load, const To& to) {
    multiply_operands<Operands, kGroups, kN>(a, load, to);
  }
};

// The operands of m16n8k8 in TF32, loaded from fp32 tiles.
// NOTE: the results of one mma are the left operand of the next mma. A thread holds columns 2t and
// 2t + 1 of the results (t is lane % 4), but a left operand has columns k = t and k = t + 4 in this
// thread. Any order of k gives the same product. Therefore the results are used as they are, and
// the right operand, which is MN-major, is loaded in the order of the results' columns.
template <>
struct Operands<float> {
  static constexpr int kDepth = 8;
  static constexpr int kMnTiles = 1;
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
  static __device__ __forceinline__ uint32_t mn_right_lane(uint32_t s_tile, int col) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const uint32_t s_col = s_tile + g % 4 * 4;
    const int chunk = col / 4 + g / 4;
    return s_col + Tile::offset(2 * t, chunk);
  }
  template <typename Tile>
  static __device__ __forceinline__ uint32_t mn_left_lane(uint32_t s_tile, int col) {
    return mn_right_lane<Tile>(s_tile, col);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_left(Left& to, uint32_t s_lane, int bytes,
                                                      int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t s_word = Tile::right_of(s_lane, tile * 64 + half * 32);
      to.set(half, load_word(s_word + bytes));
      to.set(2 + half, load_word(Tile::below_even(s_word) + bytes));
    }
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_right(Right (&to)[kMnTiles], uint32_t s_lane,
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

  // NOTE: tensor cores truncate when they add. Therefore each mma starts from 0. An fp32 addition,
  // which rounds, then adds the result of the mma to `d`. Long sums then have the error of fp32.
  static __device__ __forceinline__ void mma(float (&d)[4], const Left& a, const Right& b) {
    float r_product[4] = {};
    mma_1688(r_product, a.r, b.r[0], b.r[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += r_product[i];
  }

  template <int kGroups, int kN, bool /*kMirrored*/ = false, int kM, typename Load, typename To>
  static __device__ __forceinline__ void multiply(const Left (&a)[kM], bool /*handles_non_finite*/,
                                                  const Load& load, const To& to) {
    multiply_operands<Operands, kGroups, kN>(a, load, to);
  }
};

// Multiplies the result tiles from tile kFrom on by `scale` and stores them, in strips of 16 rows,
// to the matrix g_to with row stride row_stride and `cols` columns. Tile 0 starts at row `row` and
// column `col` of the matrix. Rows before `first` become 0, and rows from `end` on are not written.
// NOTE: the function is recursive over the tiles. With nested loops, the compiler would not unroll
// all loops and would put the accumulators in local memory.
template <int kFrom, typename T, int kStrips, int kTiles>
__device__ __forceinline__ void store_results(T* g_to, int64_t row_stride,
                                              const float (&r_tiles)[kStrips][kTiles][4],
                                              float scale, int row, int first, int end, int col,
                                              int cols) {
  const int lane_row = row + threadIdx.x % kWarp / 4, lane_col = col + threadIdx.x % 4 * 2;
  const int left = cols - lane_col - kFrom * 8;
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int result_row = lane_row + i * 8;
    if (result_row < end && left > 0) {
      T* g_pair = g_to + result_row * row_stride + lane_col + kFrom * 8;
      const T x =
          from_float<T>(result_row < first ? 0.f : r_tiles[i / 2][kFrom][i % 2 * 2] * scale);
      const T y =
          from_float<T>(result_row < first ? 0.f : r_tiles[i / 2][kFrom][i % 2 * 2 + 1] * scale);
      if (cols % 2 == 0) {
        store_vec<T, 2>(g_pair, {x, y});
      } else {
        g_pair[0] = x;
        if (left > 1) g_pair[1] = y;
      }
    }
  }
  if constexpr (kFrom + 1 < kTiles) {
    store_results<kFrom + 1>(g_to, row_stride, r_tiles, scale, row, first, end, col, cols);
  }
}

// For fp16, the kernels store a probability times 2^kProbabilityShift, so that small probabilities
// stay normal numbers.
template <typename T>
constexpr int kProbabilityShift = std::is_same_v<T, __half> ? 15 : 0;

// Returns the probability for an exponent that was computed with the factors in BackwardArgs. If T
// has 16 bits, the exponent is to base 2 and includes kProbabilityShift. In fp32, the exponent is
// to base e.
// NOTE: in fp32, lse is subtracted before the change to base 2, so kLog2e multiplies a small value.
// If lse were subtracted after the change, the rounding error of kLog2e would be multiplied by
// |lse|. Probabilities are clamped to 1, because the rounding of a score of 1e30 could give inf.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) return exp2_approx_ftz(min_or_nan(x, kProbabilityShift<T>));
  return exp2_approx(min_or_nan(x, 0.f) * kLog2e);
}

// Returns the exponent of the probability of a score.
// NOTE: in fp32, the lse of a row with one large score is this score, multiplied and rounded as
// here. The exponent is then exactly 0.
template <typename T>
__device__ __forceinline__ float exponent_of(float score, float factor, float shifted_lse) {
  if constexpr (sizeof(T) == 2) return fmaf(score, factor, shifted_lse);
  return __fadd_rn(__fmul_rn(score, factor), shifted_lse);
}

// These functions load and store semaphores that synchronise the blocks of a grid.
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
