// The mma operands of attention's backward in exact fp32. Each operand has three bf16 terms.
#pragma once

#include "attention/sync/bwd_parts.cuh"
#include "attention/sync/terms.cuh"

namespace torchweld {

// The operands of exact fp32 matmuls. Right operands come in pairs. If the number of pairs is a
// multiple of kAtOnce, kAtOnce pairs are multiplied at the same time. Otherwise one pair is
// multiplied at a time.
template <int kAtOnce>
struct SplitOperands {
  using Plane = Operands<__nv_bfloat16>;
  static constexpr int kDepth = Plane::kDepth;
  static constexpr int kMnTiles = Plane::kMnTiles;
  using Left = TermFragment<4>;
  using Right = TermFragment<2>;

  template <typename Tile>
  static __device__ __forceinline__ void load_left(Left& to, uint32_t s_lane) {
    load_terms<Tile, false>(to, s_lane);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_right(Right (&to)[2], uint32_t s_lane) {
    load_terms<Tile, false>(to, s_lane);
  }

  template <typename Tile>
  static __device__ __forceinline__ uint32_t mn_left_lane(uint32_t s_tile, int col) {
    return Plane::mn_left_lane<Tile>(s_tile, col);
  }
  template <typename Tile>
  static __device__ __forceinline__ uint32_t mn_right_lane(uint32_t s_tile, int col) {
    return Plane::mn_right_lane<Tile>(s_tile, col);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_left(Left& to, uint32_t s_lane, int bytes,
                                                      int tile) {
    load_terms<Tile, true>(to, Tile::right_of(s_lane, tile * 32) + bytes);
  }
  template <typename Tile>
  static __device__ __forceinline__ void load_mn_right(Right (&to)[2], uint32_t s_lane, int bytes,
                                                       int group) {
    load_terms<Tile, true>(to, Tile::right_of(s_lane, group * 32) + bytes);
  }

  // A result tile that is kept as an operand of a later product. NOTE: an infinite result becomes
  // NaN in the operand.
  struct Held {
    TermFragment<2> terms;
    __device__ __forceinline__ void set(const float (&r_tile)[4]) {
      terms.set(0, r_tile[0], r_tile[1]);
      terms.set(1, r_tile[2], r_tile[3]);
    }
    template <typename Tile>
    __device__ __forceinline__ void store(uint32_t s_to, int half) const {
      store_word(s_to, terms.high[half]);
      store_word(s_to + Tile::kPlaneBytes, terms.middle[half]);
      store_word(s_to + 2 * Tile::kPlaneBytes, terms.low[half]);
    }
  };
  static __device__ __forceinline__ void from_results(Left& to, const Held* r_tiles) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const TermFragment<2>& from = r_tiles[i / 2].terms;
      to.high[i] = from.high[i % 2];
      to.middle[i] = from.middle[i % 2];
      to.low[i] = from.low[i % 2];
    }
  }

  template <int kGroups, int kN, bool kMirrored = false, int kM, typename Load, typename To>
  static __device__ __forceinline__ void multiply(const Left (&a)[kM], bool handles_non_finite,
                                                  const Load& load, const To& to) {
    static_assert(kN == 2);
    multiply_terms<kGroups, kGroups % kAtOnce == 0 ? kAtOnce : 1, kMirrored>(a, handles_non_finite,
                                                                             load, to);
  }
};

}  // namespace torchweld
