// Attention's backward on mma.sync has two schedules: bwd_tiles.cuh and bwd_paired.cuh. Both
// schedules use the functions of this file: loads of tiles, the matmuls of a warp, the mask and the
// epilogue.
#pragma once

#include "attention/sync/bwd_dq.cuh"
#include "attention/sync/bwd_types.cuh"

namespace torchweld {

template <typename Config>
struct BackwardTools {
  using T = typename Config::T;
  using Ops = typename Config::Ops;
  using KeyTile = typename Config::KeyTile;
  using QTile = typename Config::QueryTileOf;
  using ScoreTile = typename Config::ScoreTile;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kRows = Config::kRows;
  static constexpr int kCols = Config::kCols;
  static constexpr int kStrips = Config::kStrips;
  static constexpr int kGroups = Config::kGroups;
  static constexpr int kDimTiles = Config::kHeadDim / kGroups / 8;
  static constexpr int kScoreTiles = kCols / 8;
  using Shared = BackwardShared<Config>;
  using Scores = float[kStrips][kScoreTiles][4];
  using HeldScores = typename Ops::Held[kStrips][kScoreTiles];

  const typename Config::Args& args;
  Shared& shared;
  DqAccumulator<Config> dq;
  // This lane's addresses in the first tile of shared memory. All tiles except dS have rows of the
  // same size. Therefore the lane's address in another tile is one of these addresses plus an
  // offset.
  uint32_t s_left, s_right, s_mn;
  bool non_finite_keys = false;     // this thread has split an inf or NaN of K or V
  bool handles_non_finite = false;  // some thread has split an inf or NaN of K, V, Q or dO

  __device__ __forceinline__ BackwardTools(const typename Config::Args& args, Shared& shared)
      : args(args), shared(shared) {
    const uint32_t s_base = shared_address(&shared);
    s_left = left_lane<KeyTile>(s_base, first_strip_row(), 0);
    s_right = right_lane<QTile>(s_base, 0, 0);
    s_mn = Ops::template mn_right_lane<QTile>(s_base, first_col());
  }

  __device__ __forceinline__ const typename Config::WorkTile& work() const { return shared.work; }

  // The block reads only the keys [first_live, end_live).
  __device__ __forceinline__ int first_live() const {
    if constexpr (Config::kMasked) {
      return work().span.begin;
    } else {
      return work().span.pad;
    }
  }
  __device__ __forceinline__ int64_t end_live() const {
    if constexpr (Config::kMasked) {
      return work().span.end;
    } else {
      return args.params.sizes.seqlen_k;
    }
  }

  __device__ __forceinline__ void load_keys() {
    const AttentionBackwardParams& p = args.params;
    const int begin = clamp_int(first_live() - work().first_key, 0, kKeys);
    const int end = clamp_int(end_live() - work().first_key, 0, kKeys);
    if constexpr (Config::kSplit) {
      const auto split = [&](KeyTile& to, const AttentionTensor& from, int64_t cols) {
        const T* g_first =
            head_of<T>(from, work().sequence, work().head_kv) + work().first_key * from.row_stride;
        non_finite_keys |= split_rows<Config::kThreads>(to, g_first, from.row_stride, begin, end,
                                                        static_cast<int>(cols), 1.f);
      };
      split(shared.k, p.key, p.sizes.head_dim);
      split(shared.v, p.value, p.sizes.head_dim_v);
    } else {
      load_tile<Config>(shared.k, head_of<T>(p.key, work().sequence, work().head_kv),
                        p.key.row_stride, work().first_key, begin, end, p.sizes.head_dim);
      if constexpr (Config::kKey) {
        load_tile<Config>(shared.v, head_of<T>(p.value, work().sequence, work().head_kv),
                          p.value.row_stride, work().first_key, begin, end, p.sizes.head_dim_v);
      }
    }
  }

  __device__ __forceinline__ auto& arriving_query(int stage) {
    if constexpr (Config::kSplit) {
      return shared.next_q;
    } else {
      return shared.q[stage];
    }
  }
  __device__ __forceinline__ auto& arriving_dout(int stage) {
    if constexpr (Config::kSplit) {
      return shared.next_dout;
    } else {
      return shared.dout[stage];
    }
  }

  __device__ __forceinline__ void load_rows(const QueryTile& tile, int stage) {
    const AttentionBackwardParams& p = args.params;
    const int64_t head = tile.head - work().sequence * p.sizes.nheads;
    const int row = tile.index * kRows;
    if constexpr (Config::kMasked) {
      const T* const g_query = head_of<T>(p.query, work().sequence, head);
      const T* const g_dout = head_of<T>(p.dout, work().sequence, head);
      const uint64_t live = group_of(tile).live >> (row % kAttentionBackwardRowPad);
      load_tile<Config, true>(arriving_query(stage), g_query, p.query.row_stride, row, 0, kRows,
                              p.sizes.head_dim, live);
      load_tile<Config, true>(arriving_dout(stage), g_dout, p.dout.row_stride, row, 0, kRows,
                              p.sizes.head_dim_v, live);
    } else {
      const int begin = clamp_int(work().span.first_row - row, 0, kRows);
      const int end = clamp_int(p.sizes.seqlen_q - row, 0, kRows);
      load_tile<Config>(arriving_query(stage), head_of<T>(p.query, work().sequence, head),
                        p.query.row_stride, row, begin, end, p.sizes.head_dim);
      load_tile<Config>(arriving_dout(stage), head_of<T>(p.dout, work().sequence, head),
                        p.dout.row_stride, row, begin, end, p.sizes.head_dim_v);
    }
    constexpr int kChunks = kRows / 4;
    const int thread = threadIdx.x;
    if (thread < 2 * kChunks) {
      const float* g_from = thread < kChunks ? args.g_lse : args.g_delta;
      float* s_to = thread < kChunks ? shared.lse[stage] : shared.delta[stage];
      const int i = thread % kChunks * 4;
      copy_async_16(shared_address(s_to + i), g_from + tile.head * args.rows + row + i, 16);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ QueryTile tile_after(const QueryTile& tile) const {
    if (tile.index > work().first_tile) return {tile.head, tile.index - 1};
    return {tile.head + 1, work().last_tile};
  }

  __device__ __forceinline__ QueryTile tile_before(const QueryTile& tile) const {
    if (tile.index < work().last_tile) return {tile.head, tile.index + 1};
    return {tile.head - 1, work().first_tile};
  }

  // Returns the BlockMask of the group of rows that contains a query tile. Only used under a
  // general mask.
  __device__ __forceinline__ const BlockMask& group_of(const QueryTile& tile) const {
    return args.group_of(work().sequence, tile.index * kRows);
  }

  // Returns the number of blocks that add to dQ of a query tile before this block. Under a general
  // mask, only blocks with a key that the tile's group of rows sees add to dQ. If this block has no
  // such key, the function returns kAddsNothing.
  static constexpr int kAddsNothing = -1;
  __device__ __forceinline__ int dq_order_of(const QueryTile& tile) const {
    if constexpr (Config::kMasked) {
      const BlockMask& group = group_of(tile);
      const bool adds = group.begin < work().first_key + kKeys && group.end > work().first_key;
      return adds ? work().dq_order - group.begin / kKeys : kAddsNothing;
    } else {
      return work().dq_order;
    }
  }

  __device__ __forceinline__ void add_dq(const QueryTile& tile, int stage) {
    if constexpr (Config::kMasked) {
      const int order = dq_order_of(tile);
      if (order == kAddsNothing) return;
      dq.add(args, tile, order, group_of(tile), shared_address(shared.ds[buffer_of(stage)].s_data),
             shared_address(shared.k.s_data), handles_non_finite);
    } else {
      dq.add(args, tile, work().dq_order, work().span,
             shared_address(shared.ds[buffer_of(stage)].s_data), shared_address(shared.k.s_data),
             handles_non_finite);
    }
  }

  // Lets the next block add to dQ of `tile`. The caller must have called add_dq(tile).
  __device__ __forceinline__ void signal_dq(const QueryTile& tile) {
    dq.signal(args, tile, Config::kMasked ? 0 : work().dq_order);
  }

  // Returns the index of the buffer of Q, dO and dS for a stage. In fp32 there is only one buffer.
  static __device__ __forceinline__ int buffer_of(int stage) { return Config::kSplit ? 0 : stage; }

  static __device__ __forceinline__ int strip_warp() {
    const int warp = threadIdx.x / kWarp;
    return Config::kPaired ? warp % Config::kStripWarps : warp;
  }
  static __device__ __forceinline__ int first_strip_row() {
    return strip_warp() / kGroups * kStrips * 16;
  }
  static __device__ __forceinline__ int group() { return threadIdx.x / kWarp % kGroups; }
  static __device__ __forceinline__ int first_col() { return group() * kDimTiles * 8; }

  // Computes r_to += A B^T. A consists of the warp's strips of K or V, in the tile at byte `keys`
  // of shared memory. B consists of kCols rows of Q or dO, in the tile at byte `rows`.
  __device__ __forceinline__ void multiply(Scores& r_to, int keys, uint32_t s_rows, int rows) {
#pragma unroll Config::kUnroll
    for (int slab = 0; slab < KeyTile::kGroups / 4; ++slab) {
#pragma unroll Config::kSlabUnroll
      for (int byte = 0; byte < 128; byte += 32) {
        typename Ops::Left a[kStrips];
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          Ops::template load_left<KeyTile>(a[i], KeyTile::right_of(s_left, byte) + keys +
                                                     i * 16 * KeyTile::kRowBytes + slab * 128);
        }
        Ops::template multiply<kScoreTiles / 2, 2, /*kMirrored=*/true>(
            a, handles_non_finite,
            [&](typename Ops::Right(&b)[2], int n) {
              Ops::template load_right<QTile>(
                  b, QTile::right_of(s_rows, byte) + rows + n * 16 * QTile::kRowBytes + slab * 128);
            },
            [&](int i, int n) -> float (&)[4] { return r_to[i][n]; });
      }
    }
  }

  // Whether every row of the query tile sees every key of the block. `first_row` is the first row
  // of the query tile.
  __device__ __forceinline__ bool all_visible(int first_row) const {
    if constexpr (Config::kMasked) {
      const BlockMask& group = args.group_of(work().sequence, first_row);
      return work().first_key >= group.last_begin && work().first_key + kKeys <= group.first_end;
    } else {
      return first_row >= work().span.first_row && first_row + kRows <= args.params.mask.seqlen_q &&
             work().first_key >= work().span.pad &&
             work().first_key + kKeys <= args.params.mask.seqlen_k &&
             (!args.params.mask.causal ||
              work().first_key + kKeys - 1 <= args.params.mask.position(first_row));
    }
  }

  // Sets hidden elements of r_tiles to 0, and also the elements of rows behind the last row.
  template <typename... Tiles>
  __device__ __forceinline__ void hide(int first_row, Tiles&... r_tiles) {
    const int strip_key = first_strip_row() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = first_row + n * 8 + threadIdx.x % 4 * 2 + odd;
        const bool in_range = row >= work().span.first_row && row < args.params.mask.seqlen_q;
        const KeyRange live =
            in_range ? args.params.mask.row_keys(row, work().span.pad) : KeyRange{0, 0};
        const int begin = clamp_int(live.begin - work().first_key, 0, kKeys);
        const int end = clamp_int(live.end - work().first_key, 0, kKeys);
#pragma unroll
        for (int i = 0; i < 2 * kStrips; ++i) {
          const int key = strip_key + i * 8;
          if (key < begin || key >= end) {
            ((r_tiles[i / 2][n][i % 2 * 2 + odd] = 0.f), ...);
          }
        }
      }
    }
  }

  // The version of hide() for a general mask.
  template <typename... Tiles>
  __device__ __forceinline__ void hide_masked(int first_row, Tiles&... r_tiles) {
    const int strip_key = work().first_key + first_strip_row() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = first_row + n * 8 + threadIdx.x % 4 * 2 + odd;
        const KeyRange32 live = args.live_of(work().sequence, row);
#pragma unroll
        for (int i = 0; i < 2 * kStrips; ++i) {
          const int key = strip_key + i * 8;
          if (key < live.begin || key >= live.end) {
            ((r_tiles[i / 2][n][i % 2 * 2 + odd] = 0.f), ...);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void hold(HeldScores& r_to, const Scores& r_from) {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) r_to[i][n].set(r_from[i][n]);
    }
  }

  static __device__ __forceinline__ void store_scores(ScoreTile& s_to, const HeldScores& r_from,
                                                      int col) {
    const int row = first_strip_row() + threadIdx.x % kWarp / 4;
    constexpr int kSize = ScoreTile::kRowBytes / kRows;
    const int byte = threadIdx.x % 4 * 2 * kSize;
    const uint32_t s_lane =
        shared_address(s_to.s_data) + ScoreTile::offset(row, byte / 16) + byte % 16;
    const uint32_t s_cols = ScoreTile::right_of(s_lane, col * kSize);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) {
        r_from[i / 2][n].template store<ScoreTile>(
            ScoreTile::right_of(s_cols, n * 8 * kSize) + i * 8 * ScoreTile::kRowBytes, i % 2);
      }
    }
  }

  // Zeroes the accumulators of those keys in the warp's strips that no row sees.
  __device__ __forceinline__ void clear_unseen(float (&r_sum)[kStrips][kDimTiles][4]) const {
    const int key = work().first_key + first_strip_row() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      if (key + i * 8 >= work().span.begin && key + i * 8 < work().span.end) continue;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        r_sum[i / 2][n][i % 2 * 2] = r_sum[i / 2][n][i % 2 * 2 + 1] = 0.f;
      }
    }
  }

  // Stores the warp's strips of dK or dV.
  __device__ __forceinline__ void store(const float (&r_sum)[kStrips][kDimTiles][4], float scale,
                                        const AttentionOutput& gradient, int64_t head_dim) const {
    T* g_head = gradient.row<T>(work().sequence, work().head_kv, 0);
    store_results<0>(g_head, gradient.row_stride, r_sum, scale,
                     work().first_key + first_strip_row(), first_live(),
                     static_cast<int>(args.params.mask.seqlen_k), first_col(),
                     static_cast<int>(head_dim));
  }
};

}  // namespace torchweld
