// The epilogue of the large-M kernel for products whose K is not split. The accumulators hold y^T.
// The epilogue transposes them, adds the bias and rounds.
#pragma once

#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"
#include "int4/large_m/loader.cuh"
#include "int4/sums.cuh"

namespace torchweld {

// The shapes of the epilogue. Sums is [kN row tiles of the warp][kM wgmmas][accumulators of a
// thread]; a wgmma covers 64 rows by kWgmmaN tokens. To store y, the threads of a block form a
// grid: kTokensAtOnce tokens by kGroups groups of columns.
template <int kTile>
struct Int4LargeMShape {
  static constexpr Int4LargeMTile kT = kInt4LargeMTiles[kTile];
  static constexpr int kN = kT.row_tiles() / kT.warps;
  static constexpr int kWgmmaN = kT.tokens < 128 ? kT.tokens : 128, kM = kT.tokens / kWgmmaN;
  using Sums = float[kN][kM][kWgmmaN / 2];
  // A thread stores 8 columns of y.
  static constexpr int kGroups = kT.rows / kGroup, kTokensAtOnce = kT.threads() / kGroups;
  static_assert(kM * kWgmmaN == kT.tokens && kWgmmaN % 16 == 0 &&
                kTokensAtOnce * kGroups == kT.threads());
};

#if TW_HAS_CLUSTERS
// Adds the bias to acc, rounds the result to 16 bits and stores it to shared memory as
// [token][row].
template <typename T, int kTile>
__device__ __forceinline__ void int4_large_m_stage(const GemmParams& p, int64_t first_row,
                                                   uint32_t s_y,
                                                   const typename Int4LargeMShape<kTile>::Sums& acc,
                                                   int warp, int lane) {
  using Shape = Int4LargeMShape<kTile>;
  constexpr int kRowBytes = Shape::kT.y_row_bytes();
#pragma unroll
  for (int n = 0; n < Shape::kN; ++n) {
    const int tile_row = (warp + n * Shape::kT.warps) * kInt4TileRows;
    float bias[2];
    const int64_t row = first_row + tile_row + lane / 4;
    int4_load_bias<T, 8>(bias, p.epilogue.bias, row, static_cast<int>(min(p.n - row, int64_t{16})));
    __syncwarp();
    const uint32_t s_to =
        s_y + (lane % 8 + lane / 16 * 8) * kRowBytes + (tile_row + lane / 8 % 2 * 8) * sizeof(T);
#pragma unroll
    for (int m = 0; m < Shape::kM; ++m) {
#pragma unroll
      for (int j = 0; j < Shape::kWgmmaN / 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* v = &acc[n][m][(j + i / 2) * 4 + i % 2 * 2];
          r[i] = pack_pair<T>(v[0] + bias[i % 2], v[1] + bias[i % 2]);
        }
        store_matrix_4_transposed(s_to + (m * Shape::kWgmmaN + j * 8) * kRowBytes, r);
      }
    }
  }
}

template <typename T, int kTile>
__device__ __forceinline__ void int4_large_m_store(const GemmParams& p, const Int4WorkTile& work,
                                                   const char* s_y, int thread) {
  using Shape = Int4LargeMShape<kTile>;
  constexpr int kRowBytes = Shape::kT.y_row_bytes(), kTokensAtOnce = Shape::kTokensAtOnce;
  const int first = thread % Shape::kGroups * kGroup;
  const int64_t column = work.first_row + first;
  const int columns = static_cast<int>(min(int64_t{kGroup}, p.n - column));
  if (columns <= 0) return;
  const int tokens = static_cast<int>(min(int64_t{Shape::kT.tokens}, p.m - work.first_token));
  int token = thread / Shape::kGroups;
  T* g_to = static_cast<T*>(p.y) + (work.first_token + token) * p.y_row_stride + column;
  const bool whole = columns == kGroup && p.y_row_stride % kGroup == 0 &&
                     reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  s_y += token * kRowBytes + first * sizeof(T);
  const int64_t stride = kTokensAtOnce * p.y_row_stride;
#pragma unroll 4
  for (; token < tokens; token += kTokensAtOnce, g_to += stride, s_y += kTokensAtOnce * kRowBytes) {
    if (whole) {
      __stwb(reinterpret_cast<uint4*>(g_to), *reinterpret_cast<const uint4*>(s_y));
    } else {
      const T* s_from = reinterpret_cast<const T*>(s_y);
      for (int i = 0; i < columns; ++i) g_to[i] = s_from[i];
    }
  }
}
#endif

}  // namespace torchweld
