// Exact fp32 in attention: tiles in shared memory whose values are stored as three bf16 terms.
//
// When a tile has arrived, every thread splits the values that it has copied. So each value is
// split only once. Then every warp loads the terms with ldmatrix, as the 16-bit kernels load their
// elements. The warp issues six mma instructions per product of two operands. Probabilities and
// their gradients are computed and split in registers.
#pragma once

#include <type_traits>

#include "attention/tile.cuh"
#include "device/mma_sync.cuh"
#include "device/vec.cuh"

namespace torchweld {

inline constexpr int kTerms = 3;

// A tile that is stored as kTerms planes of bf16. The first plane has the largest terms. The
// functions below expect addresses in the first plane.
template <int kTileRows, int kTileCols>
struct SplitTile {
  using Plane = SharedTile<__nv_bfloat16, kTileRows, kTileCols>;
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kTileCols;
  static constexpr int kRowBytes = Plane::kRowBytes;
  static constexpr int kGroups = Plane::kGroups;
  static constexpr int kPlaneBytes = Plane::kBytes;
  alignas(128) __nv_bfloat16 s_data[kTerms * kRows * kCols];

  static __device__ __forceinline__ int offset(int row, int chunk) {
    return Plane::offset(row, chunk);
  }
  static __device__ __forceinline__ uint32_t right_of(uint32_t s_byte, int bytes) {
    return Plane::right_of(s_byte, bytes);
  }
};

// Stores the terms of four neighbouring values. Without kHandlesNonFinite, the terms are wrong for
// inf, for NaN and for a value that rounds to inf. Such a value sets `check` to NaN.
template <bool kHandlesNonFinite, typename Tile>
__device__ __forceinline__ void store_terms(Tile& s_to, int row, int quad, const Vec<float, 4>& x,
                                            float& check) {
  const SplitBf16<kHandlesNonFinite> first(x.values[0], x.values[1], check);
  const SplitBf16<kHandlesNonFinite> second(x.values[2], x.values[3], check);
  char* s_quad = reinterpret_cast<char*>(s_to.s_data) + Tile::offset(row, quad / 2) + quad % 2 * 8;
  *reinterpret_cast<uint2*>(s_quad) = {first.high, second.high};
  *reinterpret_cast<uint2*>(s_quad + Tile::kPlaneBytes) = {first.middle, second.middle};
  *reinterpret_cast<uint2*>(s_quad + 2 * Tile::kPlaneBytes) = {first.low, second.low};
}

// Splits those values of a tile that this thread has copied through AttentionLoader or load_tile.
// read(row, quad) must return four of these values. The function returns true if a value is not
// finite.
template <int kThreads, typename Tile, typename Read>
__device__ __forceinline__ bool split_own(Tile& s_to, const Read& read) {
  constexpr int kQuads = Tile::kCols / 4, kRowStep = kThreads / kQuads;
  static_assert(kThreads % kQuads == 0 && Tile::kRows % kRowStep == 0);
  const int quad = threadIdx.x % kQuads, first_row = threadIdx.x / kQuads;
  float check = 0.f;
#pragma unroll 4
  for (int i = 0; i < Tile::kRows / kRowStep; ++i) {
    const int row = first_row + i * kRowStep;
    store_terms<false>(s_to, row, quad, read(row, quad), check);
  }
  if (!isnan(check)) return false;
#pragma unroll 1
  for (int i = 0; i < Tile::kRows / kRowStep; ++i) {
    const int row = first_row + i * kRowStep;
    store_terms<true>(s_to, row, quad, read(row, quad), check);
  }
  return true;
}

// Splits the values that this thread has copied. The caller must have waited for the copies.
template <int kThreads, typename Tile, typename RawTile>
__device__ __forceinline__ bool split_tile(Tile& s_to, const RawTile& s_from) {
  static_assert(Tile::kRows == RawTile::kRows && Tile::kCols == RawTile::kRowBytes / 4);
  const char* s_raw = reinterpret_cast<const char*>(s_from.s_data);
  return split_own<kThreads>(s_to, [&](int row, int quad) {
    return load_vec<float, 4>(reinterpret_cast<const float*>(s_raw + RawTile::offset(row, quad)));
  });
}

// Multiplies rows [begin, end) of a strided matrix by `factor` and splits them. Other rows, and
// columns from `cols` on, become 0 and are not read. This function is for tiles that a block loads
// only once.
template <int kThreads, typename Tile>
__device__ __forceinline__ bool split_rows(Tile& s_to, const float* g_first, int64_t row_stride,
                                           int begin, int end, int cols, float factor) {
  return split_own<kThreads>(s_to, [&](int row, int quad) {
    Vec<float, 4> x = {};
    if (quad * 4 < cols && row >= begin && row < end) {
      x = load_vec<float, 4>(g_first + row * row_stride + quad * 4);
    }
#pragma unroll
    for (float& value : x.values) value *= factor;
    return x;
  });
}

// Loads the terms of a left operand (16, 16). s_lane is a left_lane address. If kTransposed is
// true, the operand is transposed, and s_lane is a right_lane address.
template <typename Tile, bool kTransposed>
__device__ __forceinline__ void load_terms(TermFragment<4>& to, uint32_t s_lane) {
  constexpr auto load = kTransposed ? load_matrix_4_transposed : load_matrix_4;
  load(to.high, s_lane);
  load(to.middle, s_lane + Tile::kPlaneBytes);
  load(to.low, s_lane + 2 * Tile::kPlaneBytes);
}

// Loads the terms of two right operands (16, 8). s_lane is a right_lane address. If kTransposed is
// true, the operands are transposed, and s_lane is a left_lane address.
template <typename Tile, bool kTransposed>
__device__ __forceinline__ void load_terms(TermFragment<2> (&to)[2], uint32_t s_lane) {
  TermFragment<4> both;
  load_terms<Tile, kTransposed>(both, s_lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i / 2].high[i % 2] = both.high[i];
    to[i / 2].middle[i % 2] = both.middle[i];
    to[i / 2].low[i % 2] = both.low[i];
  }
}

}  // namespace torchweld
