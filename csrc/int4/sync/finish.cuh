// The epilogue of the mma.sync kernel. It adds up the staged partials of the splits of K in a fixed
// order, adds the bias and rounds.
#pragma once

#include "device/features.cuh"
#include "int4/copies.cuh"
#include "int4/sums.cuh"

namespace torchweld {

// Reads 8 sums of a token. If `splits` is 1, the sums are those of this block. Otherwise the
// function adds the sums of all splits, in the order of the cluster's ranks.
__device__ __forceinline__ void int4_read_sums(float (&v)[kGroup], const float* s_from,
                                               int splits) {
  const auto* s_pairs = reinterpret_cast<const float2*>(s_from);
#pragma unroll
  for (int i = 0; i < kGroup / 2; ++i) {
    float2 sum = splits > 1 ? make_float2(0.f, 0.f) : s_pairs[i];
#if TW_HAS_CLUSTERS
    for (int rank = 0; splits > 1 && rank < splits; ++rank) {
      const float2 partial = load_from_block(s_pairs + i, rank);
      sum.x += partial.x;
      sum.y += partial.y;
    }
#endif
    v[2 * i] = sum.x;
    v[2 * i + 1] = sum.y;
  }
}

// Writes the sums of a block, s_sums[token][row], to y. If another kernel adds the partials of the
// splits, writes the sums to the workspace instead.
template <typename T, int kTile>
__device__ __noinline__ void int4_finish(const Int4LinearParams& p, const Int4WorkTile& work,
                                         const float* s_sums) {
  constexpr Int4Tile kT = kInt4Tiles[kTile];
  constexpr int kStride = kT.sum_row_floats(), kGroups = kT.rows / kGroup;
  constexpr int kTokensAtOnce = kT.threads() / kGroups;
  static_assert(kT.threads() % kGroups == 0);
  const GemmParams& g = p.gemm;
  const int in_row = threadIdx.x % kGroups * kGroup;
  const int64_t column = work.first_row + in_row;
  if (column >= g.n) return;
  const int tokens = work.tokens_left(p, kT.tokens);
  // The blocks of a cluster divide the tokens among themselves.
  const int splits = p.choice.cluster ? p.choice.splits : 1;
  const int first = threadIdx.x / kGroups + (splits > 1 ? work.split * kTokensAtOnce : 0);
  const int stride = splits * kTokensAtOnce;
  const int64_t row = work.first_token + first;
  float v[kGroup];
  if (g.choice.splits > 1) {
    const int64_t width = gemm_sum_width(g.n, /*gated=*/false);
    float* g_sums = g.workspace + (work.split * g.m + row) * width + column;
    for (int token = first; token < tokens; token += stride, g_sums += stride * width) {
      int4_read_sums(v, s_sums + token * kStride + in_row, 1);
      store_sums(g_sums, v);
    }
    return;
  }
  const GroupWriter<T> writer(g, /*batch=*/0, column);
  for (int token = first; token < tokens; token += stride) {
    float sums[1][kGroup];
    int4_read_sums(sums[0], s_sums + token * kStride + in_row, splits);
    writer.write(work.first_token + token, 1, 1, sums);
  }
}

}  // namespace torchweld
