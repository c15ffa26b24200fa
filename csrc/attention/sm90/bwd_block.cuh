// Attention backward on Hopper: the configuration, the shared memory and the producer warpgroup.
// The producer warpgroup loads Q, K, V and dO, and adds dQ to global memory.
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

inline constexpr int kWorkStages = 2;  // the number of work tiles that a CTA holds

template <typename T_, int kTile, typename Args_>
struct BackwardSm90Config {
  using T = T_;
  using Args = Args_;
  using Params = BackwardSm90Params<Args>;
  using Shared = BackwardSm90Shared<BackwardSm90Config>;
  static constexpr bool kMasked = kIsMasked<Args>;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, KeyRange32, SequenceSpan>>;
  static constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  static constexpr int kDim = kShape.dim, kKeys = kShape.keys;
  static constexpr int kRows = kMasked ? kShape.kMaskedRows : kShape.rows;
  static constexpr int kScoreRows = kRows;  // number of query rows in a warpgroup's scores
  // Whether lse and delta are a k-slice of the products for S and dP (StatSlice). If not, consumers
  // load them from shared memory.
  static constexpr bool kStatSlice = kShape.has_stat_slice(kMasked);
  // Whether lse is loaded before S is complete. An early load of lse needs registers.
  static constexpr bool kEarlyLse = !kStatSlice && !kMasked;
  static constexpr int kThreads = kShape.kThreads, kStages = kShape.kStages;
  // A TMA box has 64 columns, and either all keys of the CTA or the rows of a query tile.
  static constexpr int kBoxColumns = kShape.kBoxColumns, kBoxes = kDim / kBoxColumns,
                       kBoxesV = kBoxes;
  static constexpr int kKeyBoxBytes = kKeys * kSwizzleRowBytes,
                       kQueryBoxBytes = kRows * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kBoxes * kKeyBoxBytes, kQueryBytes = kBoxes * kQueryBoxBytes;
  // dS is stored as (2 warpgroups, kRows, 64 keys).
  static constexpr int kDsHalfBytes = kRows * kSwizzleRowBytes, kDsBytes = 2 * kDsHalfBytes;
  // A warpgroup computes a slice of dQ^T in kDqFloats accumulators per thread. The slice has 64
  // columns of dQ and all rows of the query tile. If dQ has only 64 columns, the slice has half of
  // the rows.
  static constexpr int kDqRows = kDim == 64 ? kRows / 2 : kRows, kDqFloats = kDqRows / 2;
  static constexpr int kDqSliceBytes = kDqFloats * 128 * 4, kDqSlices = 2;
  static constexpr int kCtas = kShape.blocks, kDqStoreWarps = kShape.kDqStoreWarps;
  static __device__ __forceinline__ int cta_rank() { return 0; }
  // first_key is the first key of a warpgroup's scores. first_row is the first row of these scores
  // in the query tile.
  static __device__ __forceinline__ int first_key(const WorkTile& work, int warpgroup) {
    return work.first_key + warpgroup * 64;
  }
  static __device__ __forceinline__ int first_row(int /*warpgroup*/) { return 0; }
  static __device__ __forceinline__ const WorkTile& work_tile(const Shared& s, int stage) {
    return s.work[stage];
  }
  static __device__ __forceinline__ const float* lse_tile(const Shared& s, int stage) {
    return s.stats[stage].lse;
  }
  static_assert((kDim == 64 || kDim == 128) && kDqFloats % 4 == 0);
  static_assert(!kMasked || kRows == kAttentionBackwardRowPad);
};

// The keys that the rows of a query tile see. Only used under a general mask.
template <typename Config, bool kMasked = Config::kMasked>
struct BackwardSm90Seen {};
template <typename Config>
struct BackwardSm90Seen<Config, true> {
  BlockMask group;
  alignas(16) KeyRange32 live[Config::kRows];
};

// lse and delta of the rows of a query tile.
template <int kRows>
struct RowStatsTile {
  alignas(128) float lse[kRows], delta[kRows];
  static constexpr int kLseBytes = kRows * 4, kDeltaBytes = kRows * 4;
};
// lse and delta of the rows of a query tile as operand B of a wgmma: a row has the bfloat16 values
// {a0, a1, a2, d0, d1, d2, 0, 0}. The sum of the first three values is (shift - lse * lse_factor) /
// score_factor, and the sum of the next three values is -delta. Operand A is 1 for three of these
// values and 0 for the others. Therefore S - lse and dP - delta come out of the products. Three
// bfloat16 values hold all 24 bits of a float.
template <int kRows>
struct StatSliceTile {
  alignas(128) uint4 values[kRows];
  static constexpr int kBytes = kRows * sizeof(uint4);
};

// The numbers of work tiles and query tiles that the producer has loaded.
struct BackwardProducerCounts {
  int work_tiles, steps;
};

template <typename Config>
struct BackwardSm90Shared {
  static constexpr int kStages = Config::kStages;
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char dout[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char ds[2][Config::kDsBytes];
  alignas(128) float dq[Config::kDqStoreWarps][2][Config::kDqFloats * 128];
  std::conditional_t<Config::kStatSlice, StatSliceTile<Config::kRows>, RowStatsTile<Config::kRows>>
      stats[kStages];
  BackwardSm90Seen<Config> seen[kStages];
  int2 query_tiles[kStages];  // see BackwardQueryTile
  PipelineBarriers<kStages> q_pipeline, dout_pipeline;
  BackwardProducerCounts producer_counts;
  // The number of dS buffers that a warpgroup still uses for dK of the last work tile. Only one
  // thread of the warpgroup accesses it.
  int held_ds_buffers[2];
  PipelineBarriers<kStages> ds_pipeline;  // from each warpgroup to both warpgroups
  PipelineBarriers<1> k_pipeline, v_pipeline;
  PipelineBarriers<kWorkStages> work_pipeline;
  typename Config::WorkTile work[kWorkStages];
};

// A query tile of the mainloop, as a consumer warpgroup sees it.
struct BackwardQueryTile {
  int tile;
  int unseen_rows;  // the number of the tile's first rows that see no key
  bool is_edge;     // whether the mask hides some of the warpgroup's scores
};

// The producer writes the fields of a BackwardQueryTile for both warpgroups, if there is no general
// mask. The fields are packed into two words, because the consumers read them between products,
// where every load from shared memory takes long.
template <typename Config>
__device__ __forceinline__ int2 pack_query_tile(const MaskParams& mask,
                                                const typename Config::WorkTile& work, int tile) {
  const int row = tile * Config::kRows, end_row = row + Config::kRows;
  const int seqlen_q = static_cast<int>(mask.seqlen_q), seqlen_k = static_cast<int>(mask.seqlen_k);
  int edges = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
    const int first = Config::first_key(work, warpgroup), end = first + 64;
    // Rows before first_full_row don't see all keys of the warpgroup.
    int first_full_row = work.span.first_row;
    if (mask.causal) first_full_row = max(first_full_row, end - 1 - (seqlen_k - seqlen_q));
    if (first < work.span.pad || end > seqlen_k) first_full_row = INT_MAX;
    if (row < first_full_row || end_row > seqlen_q) edges |= 1 << warpgroup;
  }
  return make_int2(tile, max(0, work.span.first_row - row) << 2 | edges);
}
__device__ __forceinline__ BackwardQueryTile unpack_query_tile(int2 packed, int warpgroup) {
  return {packed.x, packed.y >> 2, (packed.y >> warpgroup & 1) != 0};
}

// Iterates over the heads and query tiles of a work tile. In one order, all heads process a query
// tile before the next query tile. In the other order, a head processes all its query tiles, in
// descending order, before the next head.
// NOTE: the combination of ascending query tiles and head by head does not occur for a CTA with
// several heads (attention_backward_order).
template <typename WorkTile>
struct BackwardTileIterator {
  const WorkTile& work;
  int tile, head;

  __device__ __forceinline__ explicit BackwardTileIterator(const WorkTile& work)
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

// The named barriers of the kernel.
enum BackwardSm90Barrier : int {
  kDsWritten = 1,     // both warpgroups have written dS (2-CTA kernel), or no longer read dS
  kUnseenZeroed = 2,  // both warpgroups have zeroed the unseen rows or keys
  kDqFullWg0 = 3,     // 3 and 4: a warpgroup's dQ is in shared memory (store warp 1: 5, 6)
  kDqEmptyWg0 = 7,    // 7 and 8: a warpgroup's dQ has been read (store warp 1: 9, 10)
  kConsumerWg0 = 11,  // barriers 11 and 12 synchronise the threads of one warpgroup each
  kExpWg0 = 13        // 13 and 14: a warpgroup may compute its exponentials
};
inline constexpr int kBackwardConsumerThreads = 256;
inline constexpr int kBackwardConsumerWarps = kBackwardConsumerThreads / 32;
// The number of threads of a consumer warpgroup and of a dQ store warp.
inline constexpr int kBackwardDqThreads = 128 + 32;

#if TW_HAS_WGMMA
// Every work tile fills K and V once, also if it has no query tile. Returns the position of K and V
// of the work tile at `work_state`.
__device__ __forceinline__ PipelineState<1> backward_sm90_kv_state(
    const PipelineState<kWorkStages>& work_state) {
  static_assert(kWorkStages == 2);
  return {0, static_cast<uint32_t>(work_state.stage)};
}

// Loads the tiles of a work tile. `step` is the number of query tiles that have been loaded for
// earlier work tiles. `kv_state` is the position of K and V.
template <typename Config>
__device__ __forceinline__ void backward_sm90_load_tiles(const typename Config::Params& p,
                                                         BackwardSm90Shared<Config>& s,
                                                         const typename Config::WorkTile& work,
                                                         unsigned step,
                                                         const PipelineState<1>& kv_state) {
  constexpr int kRows = Config::kRows;
  int left = work.steps();
  const int rows = static_cast<int>(p.args.rows);
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  BackwardTileIterator tiles(work);
  if (left == 0) {
    s.k_pipeline.acquire(kv_state, 0);
    s.v_pipeline.acquire(kv_state, 0);
  }
  const auto load_kv = [&](char* s_kv, const TensorMap& map, PipelineBarriers<1>& pipeline) {
    uint64_t* s_full = pipeline.acquire(kv_state, Config::kKeyBytes);
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      tma_load(shared_address(s_kv) + box * Config::kKeyBoxBytes, map, s_full,
               box * Config::kBoxColumns, work.first_key, work.head_kv, work.sequence);
    }
  };
  const auto load_tile = [&](char* s_tile, const TensorMap& map, uint64_t* s_full) {
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      tma_load(shared_address(s_tile) + box * Config::kQueryBoxBytes, map, s_full,
               box * Config::kBoxColumns, tiles.tile * kRows, tiles.head - work.sequence * nheads,
               work.sequence);
    }
  };
  using Stats = std::remove_reference_t<decltype(s.stats[0])>;
  constexpr int kSeenBytes = Config::kMasked ? sizeof(BlockMask) + kRows * sizeof(KeyRange32) : 0;
  int q_bytes = Config::kQueryBytes + kSeenBytes, dout_bytes = Config::kQueryBytes;
  if constexpr (Config::kStatSlice) {
    q_bytes += Stats::kBytes;
  } else {
    q_bytes += Stats::kLseBytes;
    dout_bytes += Stats::kDeltaBytes;
  }
  for (bool is_first = true; left > 0; --left, ++step, is_first = false) {
    const auto state = pipeline_state_of<Config::kStages>(step);
    const int64_t first_row = int64_t{tiles.head} * rows + tiles.tile * kRows;
    if constexpr (!Config::kMasked) {
      mbarrier_wait(&s.q_pipeline.empty[state.stage], state.parity ^ 1);
      s.query_tiles[state.stage] = pack_query_tile<Config>(p.args.params.mask, work, tiles.tile);
    }
    uint64_t* s_full = s.q_pipeline.acquire(state, q_bytes);
    if constexpr (Config::kMasked) {
      auto& s_seen = s.seen[state.stage];
      // NOTE: the warp has no registers to compute the index of the group apart from the row's.
      const int64_t row = int64_t{work.sequence} * rows + tiles.tile * kRows;
      bulk_load(&s_seen.group, p.args.g_groups + row / kAttentionBackwardRowPad,
                sizeof(s_seen.group), s_full);
      bulk_load(s_seen.live, p.args.g_live + row, sizeof(s_seen.live), s_full);
    }
    load_tile(s.q[state.stage], p.query, s_full);
    Stats& s_stats = s.stats[state.stage];
    if constexpr (Config::kStatSlice) {
      bulk_load(s_stats.values, p.args.g_stat_slice + first_row, Stats::kBytes, s_full);
    } else {
      bulk_load(s_stats.lse, p.args.g_lse + first_row, Stats::kLseBytes, s_full);
    }
    if (is_first) load_kv(s.k, p.key, s.k_pipeline);
    s_full = s.dout_pipeline.acquire(state, dout_bytes);
    load_tile(s.dout[state.stage], p.dout, s_full);
    if constexpr (!Config::kStatSlice) {
      bulk_load(s_stats.delta, p.args.g_delta + first_row, Stats::kDeltaBytes, s_full);
    }
    if (is_first) load_kv(s.v, p.value, s.v_pipeline);
    tiles.advance();
  }
}

// Runs the producer warp. It draws work tiles and publishes them. One lane loads K and V of a work
// tile, and Q, dO, lse and delta of every query tile. The loads of the next work tile start while
// the consumers still process the last query tiles.
template <typename Config>
__device__ __forceinline__ void backward_sm90_load(const typename Config::Params& p,
                                                   BackwardSm90Shared<Config>& s) {
  const bool leads = elect_one();
  // NOTE: the counts stay in shared memory, because the warp has only 24 registers per thread.
  BackwardProducerCounts& counts = s.producer_counts;
  if (leads) counts = {0, 0};
  __syncwarp();
  for (;;) {
    const auto work_state = pipeline_state_of<kWorkStages>(counts.work_tiles);
    typename Config::WorkTile& work = s.work[work_state.stage];
    mbarrier_wait(&s.work_pipeline.empty[work_state.stage], work_state.parity ^ 1);
    if constexpr (Config::kMasked) {
      work.template get_work_masked<Config, kWarp>(p.args, p.args.g_tickets);
    } else {
      if (threadIdx.x == 0) work.template get_work<Config>(p.args, p.args.g_tickets);
      __syncwarp();
    }
    if (leads) {
      work.first_step = counts.steps;
      mbarrier_arrive(&s.work_pipeline.full[work_state.stage]);
    }
    if (work.is_end()) break;
    if (leads) {
      backward_sm90_load_tiles(p, s, work, counts.steps, backward_sm90_kv_state(work_state));
      counts = {counts.work_tiles + 1, counts.steps + work.steps()};
    }
    __syncwarp();
  }
}

// Returns the number of CTAs that add to dQ of the tile before this CTA. Under a general mask, the
// CTA with the first key that the tile's rows see is the first to add. If the tile's rows see no
// key of this CTA, the function returns kAddsNoDq.
inline constexpr int kAddsNoDq = -1;
template <typename Config>
__device__ __forceinline__ int backward_sm90_dq_order(const typename Config::Args& args,
                                                      const typename Config::WorkTile& work,
                                                      int tile) {
  if constexpr (Config::kMasked) {
    constexpr int kKeys = Config::kKeys;
    const BlockMask& group = args.group_of(work.sequence, tile * Config::kRows);
    const bool adds = group.begin < work.first_key + kKeys && group.end > work.first_key;
    return adds ? work.dq_order - group.begin / kKeys : kAddsNoDq;
  } else {
    return work.dq_order;
  }
}

// A dQ store warp stores this CTA's dQ of the query tiles of a work tile: it waits until all
// earlier CTAs have added to dQ of the tile, then it adds this CTA's slices to global memory. The
// first CTA in the order stores instead of adding. Each CTA of a cluster adds to its own columns
// and has its own semaphores. Two store warps alternate over the query tiles. `step` is the warp's
// first tile. NOTE: with two store warps, each warp handles every second tile. One addition takes
// as long as a step of the mainloop, because the warp waits for the semaphore and the sums must be
// visible before the next CTA adds.
template <typename Config>
__device__ __forceinline__ void backward_sm90_store_dq(const typename Config::Params& p,
                                                       typename Config::Shared& s,
                                                       const typename Config::WorkTile& work,
                                                       int store_warp, int step) {
  constexpr int kSliceFloats = Config::kDqSliceBytes / 4, kStoreWarps = Config::kDqStoreWarps;
  const int steps = work.steps();
  if (steps <= step) return;
  const bool lane_0 = threadIdx.x % kWarp == 0;
  const int num_tiles = static_cast<int>(p.args.rows) / Config::kRows;
  const int rank = Config::cta_rank();
  const int full = kDqFullWg0 + 2 * store_warp, empty = kDqEmptyWg0 + 2 * store_warp;
  BackwardTileIterator tiles(work);
  for (int i = 0; i < step; ++i) tiles.advance();
  for (; step < steps; step += kStoreWarps) {
    const int64_t tile = int64_t{tiles.head} * num_tiles + tiles.tile;
    int* const g_semaphore = p.args.g_dq_semaphore + tile * Config::kCtas + rank;
    const int order = backward_sm90_dq_order<Config>(p.args, work, tiles.tile);
    const bool adds = lane_0 && order != kAddsNoDq;
    if (lane_0 && order > 0) {
      while (load_acquire(g_semaphore) != order) {
      }
      global_async_fence();
    }
    __syncwarp();
    for (int wg = 0; wg < 2; ++wg) {
      named_barrier_wait(full + wg, kBackwardDqThreads);
      if (adds) {
        const int slice = rank * 2 + wg;
        float* const g_slice = p.args.g_dq + (tile * Config::kDqSlices + slice) * kSliceFloats;
        if (order == 0) {
          bulk_store(g_slice, s.dq[store_warp][wg], Config::kDqSliceBytes);
        } else {
          bulk_add(g_slice, s.dq[store_warp][wg], Config::kDqSliceBytes);
        }
        tma_commit();
      }
    }
    if (adds) tma_wait_read<1>();
    __syncwarp();
    named_barrier_arrive(empty, kBackwardDqThreads);
    if (adds) tma_wait_read<0>();
    __syncwarp();
    named_barrier_arrive(empty + 1, kBackwardDqThreads);
    if (adds) {
      tma_wait_all();
      global_async_fence();
      store_release(g_semaphore, order + 1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kStoreWarps; ++i) tiles.advance();
  }
}

// Tells the consumer warpgroups that the dQ buffer of a store warp is free at the start.
__device__ __forceinline__ void backward_sm90_open_dq_buffer(int store_warp) {
  named_barrier_arrive(kDqEmptyWg0 + 2 * store_warp, kBackwardDqThreads);
  named_barrier_arrive(kDqEmptyWg0 + 2 * store_warp + 1, kBackwardDqThreads);
}
// A consumer warpgroup waits until a store warp has read its last dQ.
__device__ __forceinline__ void backward_sm90_close_dq_buffer(int store_warp, int warpgroup) {
  named_barrier_wait(kDqEmptyWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
}

// Runs a dQ store warp of the persistent kernel over all work tiles of the CTA.
template <typename Config>
__device__ __forceinline__ void backward_sm90_store_all_dq(const typename Config::Params& p,
                                                           typename Config::Shared& s,
                                                           int store_warp) {
  static_assert(Config::kDqStoreWarps == 2);
  backward_sm90_open_dq_buffer(store_warp);
  for (int tiles = 0;; ++tiles) {
    const auto work_state = pipeline_state_of<kWorkStages>(tiles);
    s.work_pipeline.wait(work_state);
    const typename Config::WorkTile& work = s.work[work_state.stage];
    if (work.is_end()) break;
    // The store warps alternate across work tiles, too.
    backward_sm90_store_dq<Config>(p, s, work, store_warp, (work.first_step ^ store_warp) & 1);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(&s.work_pipeline.empty[work_state.stage]);
  }
}
#endif

}  // namespace torchweld
