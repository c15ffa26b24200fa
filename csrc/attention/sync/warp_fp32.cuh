// The matmuls of one warp in exact fp32. The tiles hold bf16 terms, and mma m16n8k16 multiplies
// these terms.
//
//   scores = Q K^T    Q (kTiles * 16, kDim), K (kKeys, kDim) in shared memory
//   out += P V        P (kTiles * 16, kKeys) in the registers of the scores, V (kKeys, kDim)
//
// Columns of Q and K from `cols` on are padding and are skipped. If `handles_non_finite` is true,
// the tiles may have inf and NaN.
#pragma once

#include "attention/sync/terms.cuh"

namespace torchweld {

template <typename QueryTile, typename KeyTile, int kTiles>
struct WarpMatmulSplit {
  static constexpr int kDim = KeyTile::kCols;
  static constexpr int kKeys = KeyTile::kRows;
  // Four independent chains of mma instructions keep a tensor core busy. For head dims above 128,
  // there are registers for only two chains.
  static constexpr int kAtOnce = kTiles == 1 && kKeys % 32 == 0 ? 2 : 1;
  using Layout = AttentionLayout<float, kDim>;  // the layout of the result rows
  using Scores = float[kTiles][kKeys / 8][4];
  using Out = float[kTiles][kDim / 8][4];

  static __device__ __forceinline__ void scores(Scores& r_s, const QueryTile& s_q,
                                                const KeyTile& s_k, int first_row, int cols,
                                                bool handles_non_finite) {
    const uint32_t q = left_lane<QueryTile>(shared_address(s_q.s_data), first_row, 0);
    const uint32_t k = right_lane<KeyTile>(shared_address(s_k.s_data), 0, 0);
#pragma unroll 1
    for (int d = 0; d * 16 < cols; ++d) {
      TermFragment<4> a[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_terms<QueryTile, false>(
            a[tile], QueryTile::right_of(q, 32 * d) + tile * 16 * QueryTile::kRowBytes);
      }
      multiply_terms<kKeys / 16, kAtOnce>(
          a, handles_non_finite,
          [&](TermFragment<2>(&b)[2], int n) {
            load_terms<KeyTile, false>(b,
                                       KeyTile::right_of(k, 32 * d) + n * 16 * KeyTile::kRowBytes);
          },
          [&](int tile, int n) -> float (&)[4] { return r_s[tile][n]; });
    }
  }

  // Computes out += P V. Two neighbouring score tiles in the layout of mma's C form one tile in the
  // layout of A.
  static __device__ __forceinline__ void attend(Out& r_out, const Scores& r_p, const KeyTile& s_v,
                                                bool handles_non_finite) {
    const uint32_t v = left_lane<KeyTile>(shared_address(s_v.s_data), 0, 0);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      TermFragment<4> a[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&p)[4] = r_p[tile][2 * k + i / 2];
          a[tile].set(i, p[i % 2 * 2], p[i % 2 * 2 + 1]);
        }
      }
      multiply_terms<kDim / 16, kAtOnce>(
          a, handles_non_finite,
          [&](TermFragment<2>(&b)[2], int n) {
            load_terms<KeyTile, true>(b,
                                      KeyTile::right_of(v, 32 * n) + k * 16 * KeyTile::kRowBytes);
          },
          [&](int tile, int n) -> float (&)[4] { return r_out[tile][n]; });
    }
  }

  // Multiplies row `half` * 8 + lane / 4 of a result tile by `factor` and stores this row to shared
  // memory. If `live` is false, stores zeros instead.
  static __device__ __forceinline__ void stage(char* s_rows, const Out& r_out, int tile, int half,
                                               float factor, bool live) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float x = r_out[tile][n][2 * half] * factor;
      const float y = r_out[tile][n][2 * half + 1] * factor;
      const uint32_t byte = Layout::offset(tile * 16 + half * 8 + g, 2 * n + t / 2) + t % 2 * 8;
      const Vec<float, 2> pair = {live ? x : 0.f, live ? y : 0.f};
      store_vec(reinterpret_cast<float*>(s_rows + byte), pair);
    }
  }
};

}  // namespace torchweld
