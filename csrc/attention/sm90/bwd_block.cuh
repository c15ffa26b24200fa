// A block of attention's gradient on Hopper: its types and shared memory, and what its producer
// warpgroup does, which loads tiles and adds to dQ.
#pragma once

#include <type_traits>

#include "attention/bwd_work_tile.cuh"
#include "attention/sm90/bwd.h"
#include "attention/sync/bwd_parts.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

template <typename Config>
struct BackwardSm90Shared;

template <typename T_, int kTile, typename Args_>
struct BackwardSm90Config {
  using T = T_;
  using Args = Args_;
  using Params = BackwardSm90Params<Args>;
  using Shared = BackwardSm90Shared<BackwardSm90Config>;
  static constexpr bool kMasked = kIsMasked<Args>;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, LiveKeys, LiveSpan>>;
  static constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  static constexpr int kDim = kShape.dim, kKeys = kShape.keys;
  static constexpr int kRows = kMasked ? kShape.kMaskedRows : kShape.rows;
  static constexpr int kScoreRows = kRows;  // of a warpgroup's scores
  static constexpr bool kKeysAhead = kMasked ? kShape.masked_keys_ahead : kShape.keys_ahead;
  static constexpr int kThreads = kShape.kThreads, kStages = kShape.kStages;
  static constexpr int kLineElems = kShape.kBoxColumns, kLines = kDim / kLineElems,
                       kValueLines = kLines;
  // Bytes: of 64 columns of all keys, of a warpgroup's keys and of query rows, and of all columns.
  static constexpr int kKeyStretch = kKeys * kSwizzleRowBytes, kHalfStretch = kKeyStretch / 2,
                       kRowStretch = kRows * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kLines * kKeyStretch, kRowBytes = kLines * kRowStretch;
  // dS is (kRows, 64 keys) twice.
  static constexpr int kScoreHalf = kRows * kSwizzleRowBytes, kScoreBytes = 2 * kScoreHalf;
  // A warpgroup's share of dQ^T: 64 columns of Q, and of 64 in all half of the rows.
  static constexpr int kShareRows = kDim == 64 ? kRows / 2 : kRows;
  static constexpr int kShareFloats = kShareRows / 2;  // of a thread
  static constexpr int kShareBytes = kShareFloats * 128 * 4;
  static constexpr int kShares = 2, kBlocks = kShape.blocks, kAdders = kShape.kAdders;
  static __device__ __forceinline__ int rank() { return 0; }
  // Where a warpgroup's scores are.
  static __device__ __forceinline__ int first_key(const WorkTile& work, int warpgroup) {
    return work.first_key + warpgroup * 64;
  }
  static __device__ __forceinline__ int first_row(int /*warpgroup*/) { return 0; }
  static_assert((kDim == 64 || kDim == 128) && kShareFloats % 4 == 0);
  static_assert(!kMasked || kRows == kAttentionBackwardRowPad);
};

// What a tile's rows see, under an AttentionMask.
template <typename Config, bool kMasked = Config::kMasked>
struct BackwardSm90Seen {};
template <typename Config>
struct BackwardSm90Seen<Config, true> {
  RowGroup group;
  alignas(16) RowRange live[Config::kRows];
};

template <typename Config>
struct BackwardSm90Shared {
  static constexpr int kStages = Config::kStages;
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kRowBytes];
  alignas(kSwizzleAtomBytes) char dout[kStages][Config::kRowBytes];
  alignas(kSwizzleAtomBytes) char ds[2][Config::kScoreBytes];
  alignas(128) float dq[Config::kAdders][2][Config::kShareFloats * 128];
  alignas(128) float lse[kStages][Config::kRows];
  alignas(128) float delta[kStages][Config::kRows];
  BackwardSm90Seen<Config> seen[kStages];
  PipelineBarriers<kStages> q_pipeline, dout_pipeline;
  uint64_t k_full, v_full;
  typename Config::WorkTile work;
};

// Where a walk is: query tiles come in the block's direction, each through all of the heads, or
// they descend head by head.
// NOTE: attention_backward_order lets no block of several heads walk upwards head by head.
template <typename WorkTile>
struct BackwardWalk {
  const WorkTile& work;
  int tile, head;

  __device__ __forceinline__ explicit BackwardWalk(const WorkTile& work)
      : work(work), tile(work.start_tile()), head(work.first_head) {}
  __device__ __forceinline__ void advance() {
    if (work.tile_steps > 1) {
      if (++head == work.end_head) {
        head = work.first_head;
        tile += work.direction;
      }
      return;
    }
    tile += work.direction;
    if (tile < work.first_tile) {
      tile = work.last_tile;
      ++head;
    }
  }
};

// Named barriers: both consumers have written dS; they have cleared padding; a warpgroup's share of
// dQ is in shared memory, and has been read; a warpgroup alone.
enum BackwardSm90Barrier : int {
  kScoresWritten = 1,
  kCleared = 2,
  kShareFull = 3,   // and 4; of the second adder 5 and 6
  kShareEmpty = 7,  // and 8; 9 and 10
  kOwn = 11         // and 12
};
inline constexpr int kBackwardConsumers = 256;          // threads
inline constexpr int kBackwardShareThreads = 128 + 32;  // of a consumer and the warp that adds

#if TW_HAS_WGMMA
// One lane's loads of the block's keys and of all its query tiles.
template <typename Config>
__device__ __forceinline__ void backward_sm90_load(const typename Config::Params& p,
                                                   BackwardSm90Shared<Config>& s) {
  constexpr int kRows = Config::kRows;
  const typename Config::WorkTile& work = s.work;
  const int steps = s.work.steps();
  if (steps == 0) return;
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  const int rows = static_cast<int>(p.args.rows);
  PipelineState<Config::kStages> at;
  BackwardWalk walk(work);
  const auto load_keys = [&](char* s_to, const TensorMap& map, uint64_t* s_full) {
    mbarrier_arrive_expect_tx(s_full, Config::kKeyBytes);
#pragma unroll
    for (int line = 0; line < Config::kLines; ++line) {
      tma_load(shared_address(s_to) + line * Config::kKeyStretch, map, s_full,
               line * Config::kLineElems, work.first_key, work.head_kv, work.sequence);
    }
  };
  const auto load_rows = [&](char* s_to, float* s_stats, const TensorMap& map, const float* g_stats,
                             uint64_t* s_full) {
#pragma unroll
    for (int line = 0; line < Config::kLines; ++line) {
      tma_load(shared_address(s_to) + line * Config::kRowStretch, map, s_full,
               line * Config::kLineElems, walk.tile * kRows, walk.head - work.sequence * nheads,
               work.sequence);
    }
    bulk_load(s_stats, g_stats + int64_t{walk.head} * rows + walk.tile * kRows, kRows * 4, s_full);
  };
  constexpr int kBytes = Config::kRowBytes + kRows * 4;
  constexpr int kSeenBytes = sizeof(RowGroup) + kRows * sizeof(RowRange);
  for (int step = 0; step < steps; ++step) {
    uint64_t* s_full = s.q_pipeline.acquire(at, kBytes + (Config::kMasked ? kSeenBytes : 0));
    if constexpr (Config::kMasked) {
      auto& s_seen = s.seen[at.stage];
      bulk_load(&s_seen.group, &p.args.group_of(work.sequence, walk.tile * kRows),
                sizeof(s_seen.group), s_full);
      bulk_load(s_seen.live, &p.args.live_of(work.sequence, walk.tile * kRows), sizeof(s_seen.live),
                s_full);
    }
    load_rows(s.q[at.stage], s.lse[at.stage], p.query, p.args.g_lse, s_full);
    if (step == 0) load_keys(s.k, p.key, &s.k_full);
    s_full = s.dout_pipeline.acquire(at, kBytes);
    load_rows(s.dout[at.stage], s.delta[at.stage], p.dout, p.args.g_delta, s_full);
    if (step == 0) load_keys(s.v, p.value, &s.v_full);
    at.advance();
    walk.advance();
  }
}

// The block's turn at dQ of a tile: under an AttentionMask it is counted from the first block with
// keys that the tile's rows see, and kNoTurn where this one has none.
inline constexpr int kNoTurn = -1;
template <typename Config>
__device__ __forceinline__ int backward_sm90_turn(const typename Config::Args& args,
                                                  const typename Config::WorkTile& work, int tile) {
  if constexpr (Config::kMasked) {
    constexpr int kKeys = Config::kKeys;
    const RowGroup& group = args.group_of(work.sequence, tile * Config::kRows);
    const bool adds = group.begin < work.first_key + kKeys && group.end > work.first_key;
    return adds ? work.turn - group.begin / kKeys : kNoTurn;
  } else {
    return work.turn;
  }
}

// A warp's additions of the consumers' shares to dQ, each in the block's turn. The blocks of a
// cluster add to columns of their own and have turns of their own.
// NOTE: two warps take the steps by turns. An addition takes as long as a step: the turn is waited
// for, and what was added is to be there before the next block's turn.
template <typename Config>
__device__ __forceinline__ void backward_sm90_add(const typename Config::Params& p,
                                                  typename Config::Shared& s, int adder) {
  constexpr int kShare = Config::kShareBytes / 4, kAdders = Config::kAdders;
  const int steps = s.work.steps();
  if (steps <= adder) return;
  const bool lane_0 = threadIdx.x % kWarp == 0;
  const int tiles = static_cast<int>(p.args.rows) / Config::kRows;
  const int rank = Config::rank();
  const int full = kShareFull + 2 * adder, empty = kShareEmpty + 2 * adder;
  BackwardWalk walk(s.work);
  for (int i = 0; i < adder; ++i) walk.advance();
  named_barrier_arrive(empty, kBackwardShareThreads);
  named_barrier_arrive(empty + 1, kBackwardShareThreads);
  for (int step = adder; step < steps; step += kAdders) {
    const int64_t tile = int64_t{walk.head} * tiles + walk.tile;
    int* const g_turn = p.args.g_turns + tile * Config::kBlocks + rank;
    const int turn = backward_sm90_turn<Config>(p.args, s.work, walk.tile);
    const bool adds = lane_0 && turn != kNoTurn;
    if (lane_0 && turn > 0) {
      while (load_acquire(g_turn) != turn) {
      }
      global_async_fence();
    }
    __syncwarp();
    for (int half = 0; half < 2; ++half) {
      named_barrier_wait(full + half, kBackwardShareThreads);
      if (adds) {
        const int share = rank * 2 + half;
        float* const g_to = p.args.g_dq + (tile * Config::kShares + share) * kShare;
        if (turn == 0) {
          bulk_store(g_to, s.dq[adder][half], Config::kShareBytes);
        } else {
          bulk_add(g_to, s.dq[adder][half], Config::kShareBytes);
        }
        tma_commit();
      }
    }
    const bool last = step + kAdders >= steps;
    if (adds) tma_wait_read<1>();
    __syncwarp();
    if (!last) named_barrier_arrive(empty, kBackwardShareThreads);
    if (adds) tma_wait_read<0>();
    __syncwarp();
    if (!last) named_barrier_arrive(empty + 1, kBackwardShareThreads);
    if (adds) {
      tma_wait_all();
      global_async_fence();
      store_release(g_turn, turn + 1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAdders; ++i) walk.advance();
  }
}
#endif

}  // namespace torchweld
