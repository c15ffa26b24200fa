// From the sums of warpgroups, those of y^T, to y where K is whole: bias and rounding.
#pragma once

#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"
#include "int4/large_m/loader.cuh"
#include "int4/sums.cuh"

namespace torchweld {

// A thread's sums: [its tile of 16 rows][columns of a product][fragment of 64 rows and kWide
// tokens]
template <int kTile>
struct Int4LargeMShape {
  static constexpr Int4LargeMTile kT = kInt4LargeMTiles[kTile];
  static constexpr int kN = kT.row_tiles() / kT.warps;
  static constexpr int kWide = kT.tokens < 128 ? kT.tokens : 128, kM = kT.tokens / kWide;
  using Sums = float[kN][kM][kWide / 2];
  // 8 columns of y a thread.
  static constexpr int kPieces = kT.rows / kGroup, kAtOnce = kT.threads() / kPieces;
  static_assert(kM * kWide == kT.tokens && kWide % 16 == 0 && kAtOnce * kPieces == kT.threads());
};

#if TW_HAS_CLUSTERS
// Sums and bias, rounded, to shared memory: [token][row] of 16 bits.
template <typename T, int kTile>
__device__ __forceinline__ void int4_large_m_stage(const GemmParams& p, int64_t first_row,
                                                   uint32_t s_y,
                                                   const typename Int4LargeMShape<kTile>::Sums& acc,
                                                   int warp, int lane) {
  using Shape = Int4LargeMShape<kTile>;
  constexpr int kRowBytes = Shape::kT.y_row_bytes();
#pragma unroll
  for (int n = 0; n < Shape::kN; ++n) {
    const int in = (warp + n * Shape::kT.warps) * kInt4TileRows;
    float bias[2];
    const int64_t row = first_row + in + lane / 4;
    int4_load_bias<T, 8>(bias, p.epilogue.bias, row, static_cast<int>(min(p.n - row, int64_t{16})));
    __syncwarp();
    const uint32_t s_to =
        s_y + (lane % 8 + lane / 16 * 8) * kRowBytes + (in + lane / 8 % 2 * 8) * sizeof(T);
#pragma unroll
    for (int m = 0; m < Shape::kM; ++m) {
#pragma unroll
      for (int j = 0; j < Shape::kWide / 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* v = &acc[n][m][(j + i / 2) * 4 + i % 2 * 2];
          r[i] = pack_pair<T>(v[0] + bias[i % 2], v[1] + bias[i % 2]);
        }
        store_matrix_4_transposed(s_to + (m * Shape::kWide + j * 8) * kRowBytes, r);
      }
    }
  }
}

template <typename T, int kTile>
__device__ __forceinline__ void int4_large_m_store(const GemmParams& p, const Int4WorkTile& work,
                                                   const char* s_y, int thread) {
  using Shape = Int4LargeMShape<kTile>;
  constexpr int kRowBytes = Shape::kT.y_row_bytes(), kAtOnce = Shape::kAtOnce;
  const int in = thread % Shape::kPieces * kGroup;
  const int64_t column = work.first_row + in;
  const int columns = static_cast<int>(min(int64_t{kGroup}, p.n - column));
  if (columns <= 0) return;
  const int tokens = static_cast<int>(min(int64_t{Shape::kT.tokens}, p.m - work.first_token));
  int token = thread / Shape::kPieces;
  T* g_to = static_cast<T*>(p.y) + (work.first_token + token) * p.y_row_stride + column;
  const bool whole = columns == kGroup && p.y_row_stride % kGroup == 0 &&
                     reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  s_y += token * kRowBytes + in * sizeof(T);
  const int64_t step = kAtOnce * p.y_row_stride;
#pragma unroll 4
  for (; token < tokens; token += kAtOnce, g_to += step, s_y += kAtOnce * kRowBytes) {
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
