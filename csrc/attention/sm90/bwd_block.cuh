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
  // Whether dK += dS^T Q stays in flight while dQ is issued.
  static constexpr bool kDkInFlight = kMasked ? kShape.masked_dk_in_flight : kShape.dk_in_flight;
  // Whether lse is loaded before S is complete. An early load of lse needs registers.
  static constexpr bool kEarlyLse = kDim == 128 || (!kMasked && std::is_same_v<T, __nv_bfloat16>);
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

template <typename Config>
struct BackwardSm90Shared {
  static constexpr int kStages = Config::kStages;
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char dout[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char ds[2][Config::kDsBytes];
  alignas(128) float dq[Config::kDqStoreWarps][2][Config::kDqFloats * 128];
  alignas(128) float lse[kStages][Config::kRows];
  alignas(128) float delta[kStages][Config::kRows];
  BackwardSm90Seen<Config> seen[kStages];
  PipelineBarriers<kStages> q_pipeline, dout_pipeline;
  uint64_t k_full, v_full;
  typename Config::WorkTile work;
};

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
  kDsWritten = 1,     // both warpgroups have written dS
  kUnseenZeroed = 2,  // both warpgroups have zeroed the unseen rows or keys
  kDqFullWg0 = 3,     // 3 and 4: a warpgroup's dQ is in shared memory (store warp 1: 5, 6)
  kDqEmptyWg0 = 7,    // 7 and 8: a warpgroup's dQ has been read (store warp 1: 9, 10)
  kConsumerWg0 = 11   // 11 and 12: the threads of one warpgroup
};
inline constexpr int kBackwardConsumerThreads = 256;
inline constexpr int kBackwardDqThreads = 128 + 32;  // consumer warpgroup and store warp

#if TW_HAS_WGMMA
// One lane loads K and V once, and Q, dO, lse and delta of every query tile.
template <typename Config>
__device__ __forceinline__ void backward_sm90_load(const typename Config::Params& p,
                                                   BackwardSm90Shared<Config>& s) {
  constexpr int kRows = Config::kRows;
  const typename Config::WorkTile& work = s.work;
  const int steps = s.work.steps();
  if (steps == 0) return;
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  const int rows = static_cast<int>(p.args.rows);
  PipelineState<Config::kStages> state;
  BackwardTileIterator tiles(work);
  const auto load_kv = [&](char* s_kv, const TensorMap& map, uint64_t* s_full) {
    mbarrier_arrive_expect_tx(s_full, Config::kKeyBytes);
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      tma_load(shared_address(s_kv) + box * Config::kKeyBoxBytes, map, s_full,
               box * Config::kBoxColumns, work.first_key, work.head_kv, work.sequence);
    }
  };
  const auto load_tile = [&](char* s_tile, float* s_stats, const TensorMap& map,
                             const float* g_stats, uint64_t* s_full) {
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      tma_load(shared_address(s_tile) + box * Config::kQueryBoxBytes, map, s_full,
               box * Config::kBoxColumns, tiles.tile * kRows, tiles.head - work.sequence * nheads,
               work.sequence);
    }
    bulk_load(s_stats, g_stats + int64_t{tiles.head} * rows + tiles.tile * kRows, kRows * 4,
              s_full);
  };
  constexpr int kBytes = Config::kQueryBytes + kRows * 4;
  constexpr int kSeenBytes = sizeof(BlockMask) + kRows * sizeof(KeyRange32);
  for (int step = 0; step < steps; ++step) {
    uint64_t* s_full = s.q_pipeline.acquire(state, kBytes + (Config::kMasked ? kSeenBytes : 0));
    if constexpr (Config::kMasked) {
      auto& s_seen = s.seen[state.stage];
      bulk_load(&s_seen.group, &p.args.group_of(work.sequence, tiles.tile * kRows),
                sizeof(s_seen.group), s_full);
      bulk_load(s_seen.live, &p.args.live_of(work.sequence, tiles.tile * kRows),
                sizeof(s_seen.live), s_full);
    }
    load_tile(s.q[state.stage], s.lse[state.stage], p.query, p.args.g_lse, s_full);
    if (step == 0) load_kv(s.k, p.key, &s.k_full);
    s_full = s.dout_pipeline.acquire(state, kBytes);
    load_tile(s.dout[state.stage], s.delta[state.stage], p.dout, p.args.g_delta, s_full);
    if (step == 0) load_kv(s.v, p.value, &s.v_full);
    state.advance();
    tiles.advance();
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

// Runs a dQ store warp. The warp waits until all earlier CTAs have added to dQ of the tile. Then it
// adds this CTA's slices of dQ to global memory. The first CTA in the order stores instead of
// adding. Each CTA of a cluster adds to its own columns and has its own semaphores.
// NOTE: with two store warps, each warp handles every second tile. One addition takes as long as a
// step of the mainloop, because the warp waits for the semaphore and the sums must be visible
// before the next CTA adds.
template <typename Config>
__device__ __forceinline__ void backward_sm90_store_dq(const typename Config::Params& p,
                                                       typename Config::Shared& s, int store_warp) {
  constexpr int kSliceFloats = Config::kDqSliceBytes / 4, kStoreWarps = Config::kDqStoreWarps;
  const int steps = s.work.steps();
  if (steps <= store_warp) return;
  const bool lane_0 = threadIdx.x % kWarp == 0;
  const int num_tiles = static_cast<int>(p.args.rows) / Config::kRows;
  const int rank = Config::cta_rank();
  const int full = kDqFullWg0 + 2 * store_warp, empty = kDqEmptyWg0 + 2 * store_warp;
  BackwardTileIterator tiles(s.work);
  for (int i = 0; i < store_warp; ++i) tiles.advance();
  named_barrier_arrive(empty, kBackwardDqThreads);
  named_barrier_arrive(empty + 1, kBackwardDqThreads);
  for (int step = store_warp; step < steps; step += kStoreWarps) {
    const int64_t tile = int64_t{tiles.head} * num_tiles + tiles.tile;
    int* const g_semaphore = p.args.g_dq_semaphore + tile * Config::kCtas + rank;
    const int order = backward_sm90_dq_order<Config>(p.args, s.work, tiles.tile);
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
    const bool last = step + kStoreWarps >= steps;
    if (adds) tma_wait_read<1>();
    __syncwarp();
    if (!last) named_barrier_arrive(empty, kBackwardDqThreads);
    if (adds) tma_wait_read<0>();
    __syncwarp();
    if (!last) named_barrier_arrive(empty + 1, kBackwardDqThreads);
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
#endif

}  // namespace torchweld
