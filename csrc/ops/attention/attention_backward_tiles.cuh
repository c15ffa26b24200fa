// The gradient of attention on tensor cores, a block per tile of keys.
//
//   P = exp(scale * Q K^T - lse)     dP = dO V^T      dS = P * (dP - delta), delta = sum(dO * O)
//   dV = P^T dO                      dK = scale * dS^T Q        dQ = scale * dS K
//
// Every warp owns a strip of the keys and computes S^T and dP^T of its strip, so that P^T and dS^T
// are in its registers where the products that sum over the query rows want them; only dS goes
// through shared memory, for dQ, which is added in turns (attention_backward_share.cuh). A block
// walks the query heads of its kv head and in each the live query tiles from the last to the first,
// while the next tile is on its way. In fp32 what arrives is split into bf16 pieces once, for all
// warps (attention_split.cuh). Blocks take their work by ticket: tiles of keys ascending, so
// that a block only waits for blocks that have started, and under the causal mask the long walks
// come first; all blocks of a head begin at the last rows, where nobody waits for a diagonal.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2; the fixed order of dQ is ours.
#pragma once

#include "core/choices.h"
#include "core/launch.h"
#include "ops/attention/attention_backward_share.cuh"
#include "ops/attention/attention_backward_types.cuh"

namespace torchweld {

// One block's walk.
template <typename Config>
struct BackwardBlock {
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

  const BackwardArgs& args;
  Shared& shared;
  DqShare<Config> share;
  // Lane addresses in the first tile of shared memory; all tiles have the same rows but dS.
  uint32_t s_left, s_right, s_wide;
  bool unusual_keys = false;  // inf or NaN is among those that this thread has split
  bool careful = false;       // ... any thread, or among the query rows
  float r_dk[kStrips][Config::kKey ? kDimTiles : 1][4] = {};
  float r_dv[kStrips][Config::kValue ? kDimTiles : 1][4] = {};

  __device__ __forceinline__ BackwardBlock(const BackwardArgs& args, Shared& shared)
      : args(args), shared(shared) {
    const uint32_t s_base = shared_address(&shared);
    s_left = left_lane<KeyTile>(s_base, first_strip_row(), 0);
    s_right = right_lane<QTile>(s_base, 0, 0);
    s_wide = Ops::template wide_right_lane<QTile>(s_base, first_col());
  }

  __device__ __forceinline__ void run() {
    if (shared.job.first_head < shared.job.end_head) {
      load_keys();
      walk();
    }
    const AttentionBackwardParams& p = args.params;
    if constexpr (Config::kKey) store(r_dk, p.scale, p.dkey, p.sizes.head_dim);
    if constexpr (Config::kValue) {
      store(r_dv, 1.f / (1 << kProbabilityShift<T>), p.dvalue, p.sizes.head_dim_v);
    }
  }

 private:
  __device__ __forceinline__ const BackwardJob& job() const { return shared.job; }

  __device__ __forceinline__ void load_keys() {
    const AttentionBackwardParams& p = args.params;
    const int begin = clamp_to(job().span.pad - job().first_key, kKeys);
    const int end = clamp_to(p.sizes.seqlen_k - job().first_key, kKeys);
    if constexpr (Config::kSplit) {
      const auto split = [&](KeyTile& to, const AttentionTensor& from, int64_t cols) {
        const T* g_first =
            head_of<T>(from, job().sequence, job().head_kv) + job().first_key * from.row_stride;
        unusual_keys |= split_rows<Config::kThreads>(to, g_first, from.row_stride, begin, end,
                                                     static_cast<int>(cols), 1.f);
      };
      split(shared.k, p.key, p.sizes.head_dim);
      split(shared.v, p.value, p.sizes.head_dim_v);
    } else {
      load_tile<Config>(shared.k, head_of<T>(p.key, job().sequence, job().head_kv),
                        p.key.row_stride, job().first_key, begin, end, p.sizes.head_dim);
      if constexpr (Config::kKey) {
        load_tile<Config>(shared.v, head_of<T>(p.value, job().sequence, job().head_kv),
                          p.value.row_stride, job().first_key, begin, end, p.sizes.head_dim_v);
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
    const int64_t head = tile.head - job().sequence * p.sizes.nheads;
    const int row = tile.index * kRows;
    const int begin = clamp_to(job().span.first_row - row, kRows);
    const int end = clamp_to(p.sizes.seqlen_q - row, kRows);
    load_tile<Config>(arriving_query(stage), head_of<T>(p.query, job().sequence, head),
                      p.query.row_stride, row, begin, end, p.sizes.head_dim);
    load_tile<Config>(arriving_dout(stage), head_of<T>(p.dout, job().sequence, head),
                      p.dout.row_stride, row, begin, end, p.sizes.head_dim_v);
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

  __device__ __forceinline__ void walk() {
    const BackwardJob& job = shared.job;
    QueryTile tile = {job.first_head, job.last_tile};
    load_rows(tile, 0);
    int stage = 0;
    while (true) {
      const QueryTile next = tile.index > job.first_tile ? QueryTile{tile.head, tile.index - 1}
                                                         : QueryTile{tile.head + 1, job.last_tile};
      // Behind this barrier nobody needs the tile before any more, and its dS is complete.
      copy_async_wait<0>();
      __syncthreads();
      bool unusual = unusual_keys;
      if constexpr (Config::kSplit) {
        unusual |= split_tile<Config::kThreads>(shared.q[0], shared.next_q);
        unusual |= split_tile<Config::kThreads>(shared.dout[0], shared.next_dout);
      }
      if (next.head < job.end_head) load_rows(next, 1 - stage);
      if constexpr (Config::kKey) {
        if (tile.index < job.last_tile || tile.head > job.first_head) {
          add_dq(tile_before(tile), 1 - stage);
        }
      }
      if constexpr (Config::kSplit) careful = __syncthreads_or(unusual);
      compute(tile, stage);
      if (next.head == job.end_head) break;
      tile = next;
      stage = 1 - stage;
    }
    if constexpr (Config::kKey) {
      __syncthreads();
      add_dq(tile, stage);
      share.pass_on(args, tile, job.turn);
    }
  }

  __device__ __forceinline__ QueryTile tile_before(const QueryTile& tile) const {
    if (tile.index < job().last_tile) return {tile.head, tile.index + 1};
    return {tile.head - 1, job().first_tile};
  }

  __device__ __forceinline__ void add_dq(const QueryTile& tile, int stage) {
    share.add(args, tile, job().turn, job().span, shared_address(shared.ds[place(stage)].s_data),
              shared_address(shared.k.s_data), careful);
  }

  // Which of the tiles of Q, dO and dS; in fp32 there is one.
  static __device__ __forceinline__ int place(int stage) { return Config::kSplit ? 0 : stage; }

  static __device__ __forceinline__ int first_strip_row() {
    return threadIdx.x / kWarp / kGroups * kStrips * 16;
  }
  static __device__ __forceinline__ int group() { return threadIdx.x / kWarp % kGroups; }
  static __device__ __forceinline__ int first_col() { return group() * kDimTiles * 8; }

  __device__ __forceinline__ void compute(const QueryTile& tile, int stage) {
    const int first_row = tile.index * kRows;
    const bool all_visible =
        first_row >= job().span.first_row && first_row + kRows <= args.rule.seqlen_q &&
        job().first_key >= job().span.pad && job().first_key + kKeys <= args.rule.seqlen_k &&
        (!args.rule.causal || job().first_key + kKeys - 1 <= args.rule.position(first_row));
#pragma unroll 1
    for (int col = 0; col < kRows; col += kCols) {
      Scores r_p = {}, r_ds = {};
      const int rows_at = place(stage) * static_cast<int>(sizeof(QTile)) + col * QTile::kRowBytes;
      multiply(r_p, offsetof(Shared, k), s_right + rows_at, offsetof(Shared, q));
      if constexpr (Config::kKey) {
        multiply(r_ds, offsetof(Shared, v), s_right + rows_at, offsetof(Shared, dout));
        if (col == 0) share.pass_on(args, tile_before(tile), job().turn);
      }
      differentiate(r_p, r_ds, stage, col);
      if (!all_visible) hide(r_p, r_ds, first_row + col);
      HeldScores r_held_p, r_held_ds;
      hold(r_held_p, r_p);
      hold(r_held_ds, r_ds);
      if constexpr (Config::kKey) {
        if (group() == 0) store_scores(shared.ds[place(stage)], r_held_ds, col);
        if (col + kCols == kRows) share.prefetch(args, tile, job().turn);
      }
      if constexpr (Config::kValue) {
        accumulate(r_dv, r_held_p, s_wide + rows_at, offsetof(Shared, dout));
      }
      if constexpr (Config::kKey) {
        accumulate(r_dk, r_held_ds, s_wide + rows_at, offsetof(Shared, q));
      }
    }
  }

  // r_to += the warp's strips of the keys at byte `keys` of shared memory @ kCols rows of those at
  // byte `rows`, transposed.
  __device__ __forceinline__ void multiply(Scores& r_to, int keys, uint32_t s_rows, int rows) {
#pragma unroll Config::kUnroll
    for (int line = 0; line < KeyTile::kGroups / 4; ++line) {
#pragma unroll Config::kLineUnroll
      for (int byte = 0; byte < 128; byte += 32) {
        typename Ops::Left a[kStrips];
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          Ops::template load_left<KeyTile>(a[i], KeyTile::right_of(s_left, byte) + keys +
                                                     i * 16 * KeyTile::kRowBytes + line * 128);
        }
        Ops::template multiply<kScoreTiles / 2, 2>(
            a, careful,
            [&](typename Ops::Right(&b)[2], int n) {
              Ops::template load_right<QTile>(
                  b, QTile::right_of(s_rows, byte) + rows + n * 16 * QTile::kRowBytes + line * 128);
            },
            [&](int i, int n) -> float (&)[4] { return r_to[i][n]; });
      }
    }
  }

  // r_p: scores -> P, shifted;  r_ds: dP -> dS. delta in shared memory is shifted back already.
  __device__ __forceinline__ void differentiate(Scores& r_p, Scores& r_ds, int stage, int col) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const int first = col + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][first + n * 8]);
      float2 delta = {};
      if constexpr (Config::kKey) {
        delta = *reinterpret_cast<const float2*>(&shared.delta[stage][first + n * 8]);
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = r_p[i][n][j];
          p = exponential<T>(fmaf(p, args.score_factor, j % 2 ? lse.y : lse.x));
          r_ds[i][n][j] = p * fmaf(r_ds[i][n][j], kUnshift, -(j % 2 ? delta.y : delta.x));
        }
      }
    }
  }

  // Clears what the mask hides, rows beyond the last included.
  __device__ __forceinline__ void hide(Scores& r_p, Scores& r_ds, int first_row) {
    const int strip_key = first_strip_row() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = first_row + n * 8 + threadIdx.x % 4 * 2 + odd;
        const bool in_range = row >= job().span.first_row && row < args.rule.seqlen_q;
        const LiveRange live = in_range ? args.rule.live(row, job().span.pad) : LiveRange{0, 0};
        const int begin = clamp_to(live.begin - job().first_key, kKeys);
        const int end = clamp_to(live.end - job().first_key, kKeys);
#pragma unroll
        for (int i = 0; i < 2 * kStrips; ++i) {
          const int key = strip_key + i * 8;
          if (key < begin || key >= end) {
            r_p[i / 2][n][i % 2 * 2 + odd] = 0.f;
            r_ds[i / 2][n][i % 2 * 2 + odd] = 0.f;
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

  // r_sum += r_scores (the warp's strips, kCols) @ kCols of the rows at byte `rows`.
  __device__ __forceinline__ void accumulate(float (&r_sum)[kStrips][kDimTiles][4],
                                             const HeldScores& r_scores, uint32_t s_rows,
                                             int rows) {
#pragma unroll
    for (int k = 0; k < kCols; k += Ops::kDepth) {
      typename Ops::Left a[kStrips];
#pragma unroll
      for (int i = 0; i < kStrips; ++i) Ops::from_results(a[i], &r_scores[i][k / 8]);
      Ops::template multiply<kDimTiles / Ops::kWideTiles, Ops::kWideTiles>(
          a, careful,
          [&](typename Ops::Right(&b)[Ops::kWideTiles], int n) {
            Ops::template load_wide_right<QTile>(b, s_rows, rows + k * QTile::kRowBytes, n);
          },
          [&](int i, int n) -> float (&)[4] { return r_sum[i][n]; });
    }
  }

  // The warp's strips of dK or dV.
  __device__ __forceinline__ void store(const float (&r_sum)[kStrips][kDimTiles][4], float scale,
                                        void* g_grad, int64_t head_dim) const {
    const int64_t head = job().sequence * args.params.sizes.nheads_kv + job().head_kv;
    T* g_head = static_cast<T*>(g_grad) + head * args.rule.seqlen_k * head_dim;
    store_results<0>(g_head, r_sum, scale, job().first_key + first_strip_row(), job().span.pad,
                     static_cast<int>(args.rule.seqlen_k), first_col(), static_cast<int>(head_dim));
  }
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kShape.blocks_per_sm) void attention_backward_kernel(
    const __grid_constant__ BackwardArgs args, unsigned* g_ticket) {
  extern __shared__ __align__(128) unsigned char s_raw[];
  BackwardShared<Config>& shared = *reinterpret_cast<BackwardShared<Config>*>(s_raw);
  if (threadIdx.x == 0) shared.job.template take<Config>(args, g_ticket);
  __syncthreads();
  BackwardBlock<Config>(args, shared).run();
}

template <typename Config>
void launch_backward_part(const BackwardArgs& args, unsigned* g_ticket, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t key_blocks = (sizes.seqlen_k + Config::kKeys - 1) / Config::kKeys;
  const int64_t blocks = sizes.batch * sizes.nheads_kv * key_blocks;
  const auto kernel = attention_backward_kernel<Config>;
  constexpr int kBytes = sizeof(BackwardShared<Config>);
  static_assert(kBytes <= Config::kShape.shared_bytes());
  allow_shared_memory(kernel, kBytes);
  note_kernel(kernel, Config::kThreads, kBytes);
  kernel<<<static_cast<unsigned>(blocks), Config::kThreads, kBytes, stream>>>(args, g_ticket);
}

template <typename T, int kTile>
void launch_attention_backward_tile(const BackwardArgs& args, cudaStream_t stream) {
  using Part = BackwardPart;
  unsigned* const g_ticket = args.g_tickets;
  if constexpr (kAttentionBackwardTiles[kTile].split) {
    launch_backward_part<BackwardConfig<T, kTile, Part::kValue>>(args, g_ticket, stream);
    launch_backward_part<BackwardConfig<T, kTile, Part::kKey>>(args, g_ticket + 1, stream);
  } else {
    launch_backward_part<BackwardConfig<T, kTile, Part::kBoth>>(args, g_ticket, stream);
  }
}

}  // namespace torchweld
