// dQ in turns: the sums of one query tile grow by one block's part at a time, first that of the
// first live keys, then on in the order of the keys, so that they are the same bits in every run.
// That is as fast as atomic additions, and needs no pass of its own: attention_backward (4, 16,
// 4096, 128) bfloat16 causal beside SDPA flash, whose dQ is added atomically.
//
// Every warp of a block owns the same share of a tile in every block and takes its turns alone. The
// first part is stored without a read, the last one goes straight into dQ.
//
// Under a general mask the blocks that add to a query tile are those with keys between the first
// and the last that the tile's group of rows sees (BlockMask): a run of key tiles without a hole,
// counted from its first. Other blocks may compute the tile, all hidden, but neither add nor wait.
// So a block only waits for blocks of lower key tiles there too.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sync/bwd_parts.cuh"

namespace torchweld {

// A tile of query rows: of head `head` of all batch * nheads.
struct QueryTile {
  int head;
  int index;
};

template <typename Config>
struct DqShare {
  using T = typename Config::T;
  using Ops = typename Config::Ops;
  using KeyTile = typename Config::KeyTile;
  using ScoreTile = typename Config::ScoreTile;
  // 32 rows, or 16 where a warp would have less than 16 columns of them.
  static constexpr bool kTall =
      Config::kRows >= 32 && Config::kRows * Config::kHeadDim >= 32 * 16 * Config::kWarps;
  static constexpr int kShareRows = kTall ? 32 : 16;
  static constexpr int kWarpsAcross = Config::kWarps / (Config::kRows / kShareRows);
  static constexpr int kShareCols = Config::kHeadDim / kWarpsAcross;
  static constexpr int kMTiles = kShareRows / 16;
  static constexpr int kNTiles = kShareCols / 8;
  static constexpr int kGroups = kNTiles / Ops::k2CtaTiles;
  static constexpr bool kPrefetches = Config::kShape.prefetches;
  static_assert(kMTiles * kNTiles * 4 == Config::kShape.share_registers() && kGroups > 0);

  float r_sum[kMTiles][kNTiles][4];
  bool loaded = false;   // r_sum holds the parts before this block's
  bool to_pass = false;  // the turn has not been passed on yet

  static __device__ __forceinline__ int64_t index(const BackwardArgs& args, const QueryTile& tile) {
    const int64_t tiles = args.rows / Config::kRows;
    return (tile.head * tiles + tile.index) * Config::kWarps + threadIdx.x / kWarp;
  }

  static __device__ __forceinline__ float4* sums_at(const BackwardArgs& args, int64_t index) {
    return reinterpret_cast<float4*>(args.g_dq + index * (kMTiles * kNTiles * 4 * kWarp)) +
           threadIdx.x % kWarp;
  }

  // NOTE: past the L1 cache, which another SM's stores don't reach.
  __device__ __forceinline__ void load(const BackwardArgs& args, int64_t index) {
    const float4* g_sums = sums_at(args, index);
#pragma unroll
    for (int i = 0; i < kMTiles * kNTiles; ++i) {
      const float4 part = __ldcg(g_sums + i * kWarp);
      float (&to)[4] = r_sum[i / kNTiles][i % kNTiles];
      to[0] = part.x, to[1] = part.y, to[2] = part.z, to[3] = part.w;
    }
  }

  // Starts to read the sums, if it is this block's turn already. To be called before every add();
  // with a turn of 0 where there is nothing to read yet.
  __device__ __forceinline__ void prefetch(const BackwardArgs& args, const QueryTile& tile,
                                           int turn) {
    if constexpr (kPrefetches) {
      clear();  // so that nothing is kept in these registers until here
      if (turn == 0 || (Config::kMasked && turn < 0)) return;
      const int64_t i = index(args, tile);
      int passed = 0;
      if (threadIdx.x % kWarp == 0) passed = load_acquire(args.g_dq_semaphore + i);
      loaded = __shfl_sync(~0u, passed, 0) == turn;
      if (loaded) load(args, i);
    }
  }

  // Adds this block's dS K: s_scores is dS^T (kKeys, kRows), s_keys K (kKeys, kHeadDim). `live`
  // says what the rows see, a SequenceSpan or a BlockMask; `handles_non_finite` where K may have
  // inf or NaN.
  template <typename Live>
  __device__ __forceinline__ void add(const BackwardArgs& args, const QueryTile& tile, int turn,
                                      const Live& live, uint32_t s_scores, uint32_t s_keys,
                                      bool handles_non_finite) {
    const int64_t i = index(args, tile);
    if (turn == 0) {
      if constexpr (!kPrefetches) clear();
    } else if (!loaded) {
      if (threadIdx.x % kWarp == 0) {
        while (load_acquire(args.g_dq_semaphore + i) != turn) {
        }
      }
      __syncwarp();
      load(args, i);
    }
    loaded = false;
    multiply(s_scores, s_keys, handles_non_finite);

    const int first_row = tile.index * Config::kRows;
    if (last_turn(args, first_row, live) == turn) {
      finish(args, tile.head, first_row, live);
      return;
    }
    float4* g_sums = sums_at(args, i);
#pragma unroll
    for (int j = 0; j < kMTiles * kNTiles; ++j) {
      const float (&r)[4] = r_sum[j / kNTiles][j % kNTiles];
      __stcg(g_sums + j * kWarp, make_float4(r[0], r[1], r[2], r[3]));
    }
    to_pass = true;
  }

  // Passes the turn on. Some work lies between the stores and this, so that it waits for little.
  // NOTE: under a general mask the turn changes from tile to tile, and there is no register for
  // it; the counter holds it, and nobody else writes there.
  __device__ __forceinline__ void pass_on(const BackwardArgs& args, const QueryTile& tile,
                                          int turn) {
    if (!to_pass) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      int* g_turn = args.g_dq_semaphore + index(args, tile);
      if constexpr (Config::kMasked) {
        increment_release(g_turn);
      } else {
        store_release(g_turn, turn + 1);
      }
    }
    to_pass = false;
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
      r_sum[i / (kNTiles * 4)][i / 4 % kNTiles][i % 4] = 0.f;
    }
  }
  static __device__ __forceinline__ int row_in_tile() {
    return threadIdx.x / kWarp / kWarpsAcross * kShareRows;
  }
  static __device__ __forceinline__ int col_in_tile() {
    return threadIdx.x / kWarp % kWarpsAcross * kShareCols;
  }

  __device__ __forceinline__ void multiply(uint32_t s_scores, uint32_t s_keys,
                                           bool handles_non_finite) {
    const uint32_t left = Ops::template wide_left_lane<ScoreTile>(s_scores, row_in_tile());
    const uint32_t right = Ops::template wide_right_lane<KeyTile>(s_keys, col_in_tile());
#pragma unroll Config::kUnroll
    for (int k = 0; k < Config::kKeys; k += Ops::kDepth) {
      typename Ops::Left a[kMTiles];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        Ops::template load_wide_left<ScoreTile>(a[m], left, k * ScoreTile::kRowBytes, m);
      }
      Ops::template multiply<kGroups, Ops::k2CtaTiles>(
          a, handles_non_finite,
          [&](typename Ops::Right(&b)[Ops::k2CtaTiles], int group) {
            Ops::template load_wide_right<KeyTile>(b, right, k * KeyTile::kRowBytes, group);
          },
          [&](int m, int n) -> float (&)[4] { return r_sum[m][n]; });
    }
  }

  static __device__ __forceinline__ int last_turn(const BackwardArgs& args, int first_row,
                                                  const SequenceSpan& span) {
    int64_t last_row = first_row + Config::kRows - 1;
    if (last_row >= args.params.mask.seqlen_q) last_row = args.params.mask.seqlen_q - 1;
    const int last_key = static_cast<int>(args.params.mask.row_keys(last_row, span.pad).end) - 1;
    return last_key / Config::kKeys - span.pad / Config::kKeys;
  }
  static __device__ __forceinline__ int last_turn(const BackwardArgs&, int,
                                                  const BlockMask& group) {
    return (group.end - 1) / Config::kKeys - group.begin / Config::kKeys;
  }

  __device__ __forceinline__ void finish(const BackwardArgs& args, int64_t head, int first_row,
                                         const SequenceSpan& span) const {
    store(args, head, first_row, span.first_row);
  }
  __device__ __forceinline__ void finish(const BackwardArgs& args, int64_t head, int first_row,
                                         const BlockMask& group) {
    const int row = first_row + row_in_tile() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      if (group.sees(row + i * 8)) continue;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        r_sum[i / 2][n][i % 2 * 2] = r_sum[i / 2][n][i % 2 * 2 + 1] = 0.f;
      }
    }
    store(args, head, first_row, 0);
  }

  __device__ __forceinline__ void store(const BackwardArgs& args, int64_t head, int first_row,
                                        int first_live_row) const {
    const int cols = static_cast<int>(args.params.sizes.head_dim);
    T* g_dq = static_cast<T*>(args.params.dquery) + head * args.params.mask.seqlen_q * cols;
    store_results<0>(g_dq, r_sum, args.params.scale, first_row + row_in_tile(), first_live_row,
                     static_cast<int>(args.params.mask.seqlen_q), col_in_tile(), cols);
  }
};

}  // namespace torchweld
