// The dQ store warps of attention's backward on Hopper. They add the CTA's dQ to fp32 sums in
// global memory, in the order of the keys. The last CTA in this order may round the sums at once
// (attention_backward_rounds_dq).
#pragma once

#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// A dQ store warp.
// NOTE: if a kernel has two store warps, they alternate over the query tiles, because one addition
// takes as long as a step of the mainloop. The warp waits for the semaphore, and the sums must be
// visible before the next CTA adds.
template <typename Config>
struct BackwardSm90DqWarp {
  using Params = typename Config::Params;
  using Shared = typename Config::Shared;
  using WorkTile = typename Config::WorkTile;
  static constexpr int kRows = Config::kRows, kStoreWarps = Config::kDqStoreWarps;
  static constexpr int kSlices = Config::kCtaDqSlices;
  static constexpr int kSliceFloats = Config::kDqSliceBytes / 4;
  static constexpr int kStripStages = kDqStripStages<Config>;

  const Params& p;
  Shared& s;
  const int store_warp;

  // Process all work tiles of the CTA.
  __device__ __forceinline__ void run() {
    // The buffer is free at the start.
    named_barrier_arrive(empty_barrier(), kBackwardDqThreads);
    named_barrier_arrive(empty_barrier() + 1, kBackwardDqThreads);
    if constexpr (Config::kCtas == 2) {
      process(s.work[0], 0);
    } else {
      for (int tiles = 0;; ++tiles) {
        const auto work_state = pipeline_state_of<kWorkStages>(tiles);
        s.work_pipeline.wait(work_state);
        const WorkTile& work = s.work[work_state.stage];
        if (work.is_end()) break;
        // The store warps alternate across work tiles, too.
        process(work, (work.first_step ^ store_warp) % kStoreWarps);
        __syncwarp();
        if (is_lane_0()) mbarrier_arrive(&s.work_pipeline.empty[work_state.stage]);
      }
    }
  }

 private:
  static __device__ __forceinline__ bool is_lane_0() { return threadIdx.x % kWarp == 0; }
  __device__ __forceinline__ float* buffer(int slice) const { return s.dq[store_warp][slice]; }
  __device__ __forceinline__ int full_barrier() const { return kDqFullWg0 + 2 * store_warp; }
  __device__ __forceinline__ int empty_barrier() const { return kDqEmptyWg0 + 2 * store_warp; }

  // Process query tile `step` of a work tile and every kStoreWarps-th query tile after it.
  __device__ __forceinline__ void process(const WorkTile& work, int step) {
    BackwardTileIterator tiles(work);
    for (int i = 0; i < step; ++i) tiles.advance();
    for (int left = work.steps() - step; left > 0; left -= kStoreWarps) {
      add_tile(work, tiles.head, tiles.tile);
#pragma unroll
      for (int i = 0; i < kStoreWarps; ++i) tiles.advance();
    }
  }

  // The position of this CTA among the CTAs that add to a query tile.
  struct Order {
    int before;    // the number of CTAs that add before this CTA, or kAddsNoDq
    bool is_last;  // whether no CTA adds after this CTA
  };
  static constexpr int kAddsNoDq = -1;
  // Under a general mask, the CTA with the first key that the tile's rows see is the first to add.
  // If the tile's rows see no key of this CTA, the CTA does not add.
  __device__ __forceinline__ Order order_of(const WorkTile& work, int tile) const {
    const int end_key = work.first_key + Config::kKeys;
    if constexpr (Config::kMasked) {
      const BlockMask& group = p.args.group_of(work.sequence, tile * kRows);
      if (group.begin >= end_key || group.end <= work.first_key) return {kAddsNoDq, false};
      return {work.dq_order - group.begin / Config::kKeys, group.end <= end_key};
    } else {
      const MaskParams& mask = p.args.params.mask;
      const int next_row = work.span.first_row_seeing(mask, end_key);  // sees keys of later CTAs
      return {work.dq_order, (tile + 1) * kRows <= next_row || next_row >= mask.seqlen_q};
    }
  }

  // Wait until all earlier CTAs have added to dQ of the query tile. Then add this CTA's slices of
  // dQ. The first CTA in the order stores instead of adding. With rounds_dq, the last CTA writes
  // the gradient. Each CTA of a cluster has its own columns and its own semaphores.
  __device__ __forceinline__ void add_tile(const WorkTile& work, int head, int tile) {
    const int num_tiles = static_cast<int>(p.args.rows) / kRows;
    const int64_t g_tile = int64_t{head} * num_tiles + tile;
    const int rank = Config::cta_rank();
    int* const g_semaphore = p.args.g_dq_semaphore + g_tile * Config::kCtas + rank;
    float* const g_sums =
        p.args.g_dq + (g_tile * Config::kDqSlices + rank * kSlices) * kSliceFloats;
    const Order order = order_of(work, tile);
    const bool adds = is_lane_0() && order.before != kAddsNoDq;
    if (is_lane_0() && order.before > 0) {
      while (load_acquire(g_semaphore) != order.before) {
      }
      global_async_fence();
    }
    __syncwarp();
    const auto add = [&](int slice) {
      float* const g_slice = g_sums + slice * kSliceFloats;
      if (order.before == 0) {
        bulk_store(g_slice, buffer(slice), Config::kDqSliceBytes);
      } else {
        bulk_add(g_slice, buffer(slice), Config::kDqSliceBytes);
      }
    };
    for (int wg = 0; wg < 2; ++wg) {
      named_barrier_wait(full_barrier() + wg, kBackwardDqThreads);
      if (adds) {
        add(wg);
        if (kSlices == 3 && wg == 1) add(2);
        tma_commit();
      }
    }
    if constexpr (kStoreWarps > 1) {
      if (p.args.rounds_dq && order.is_last) {
        write_gradient(work, head, tile, g_sums);
        named_barrier_arrive(empty_barrier(), kBackwardDqThreads);
        named_barrier_arrive(empty_barrier() + 1, kBackwardDqThreads);
        return;
      }
    }
    // If there is a third slice, warpgroup 0 may overwrite it in the next step.
    if (adds) tma_wait_read<kSlices == 3 ? 0 : 1>();
    __syncwarp();
    named_barrier_arrive(empty_barrier(), kBackwardDqThreads);
    if (adds) tma_wait_read<0>();
    __syncwarp();
    named_barrier_arrive(empty_barrier() + 1, kBackwardDqThreads);
    if (adds) {
      tma_wait_all();
      global_async_fence();
      store_release(g_semaphore, order.before + 1);
    }
    __syncwarp();
  }

  // Write the gradient of the query tile, after this CTA's dQ has been added to the sums. The sums
  // return from global memory to the second half of the buffer, one strip per stage. The warp
  // rounds them into the first half, which receives one TMA box per slice.
  __device__ __forceinline__ void write_gradient(const WorkTile& work, int head, int tile,
                                                 const float* g_sums) const {
    const auto load_strip = [&](int strip) {
      uint64_t* s_full = strip_full(strip);
      mbarrier_arrive_expect_tx(s_full, kDqStripFloats * 4);
      bulk_load(strip_stage(strip), g_sums + strip * kDqStripFloats, kDqStripFloats * 4, s_full);
    };
    if (is_lane_0()) {
      tma_wait_all();
      global_async_fence();
#pragma unroll 1
      for (int strip = 0; strip < kStripStages; ++strip) load_strip(strip);
    }
    __syncwarp();
#pragma unroll 1
    for (int strip = 0; strip < 2 * kStripStages; ++strip) {
      mbarrier_wait(strip_full(strip), strip / kStripStages);
      // The cache need not write these sums to memory.
      discard_from_cache(g_sums + strip * kDqStripFloats + threadIdx.x % kWarp * 32);
      // With head dim 64, the slices have the same columns and follow each other in the rows.
      const int row_in_tile = strip * 16 % kRows;
      round_strip(live_rows(work, tile * kRows + row_in_tile), strip);
      __syncwarp();
      if (is_lane_0() && strip < kStripStages) load_strip(strip + kStripStages);
    }
    async_fence();
    __syncwarp();
    if (is_lane_0()) {
      constexpr bool kHasHalves = Config::kDim == 64;  // a slice has half of the rows
      for (int slice = 0; slice < kSlices; ++slice) {
        tma_store(
            p.dquery, box_address() + slice * Config::kDqRows * kSwizzleRowBytes,
            kHasHalves ? 0 : slice * 64, tile * kRows + (kHasHalves ? slice * Config::kDqRows : 0),
            head - work.sequence * static_cast<int>(p.args.params.sizes.nheads), work.sequence);
      }
      tma_commit();
      tma_wait_read<0>();
    }
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t box_address() const {
    return shared_address(s.dq[store_warp]);
  }
  __device__ __forceinline__ float* strip_stage(int strip) const {
    return buffer(0) + (kStripStages + strip % kStripStages) * kDqStripFloats;
  }
  __device__ __forceinline__ uint64_t* strip_full(int strip) const {
    return &s.dq_strip_full[store_warp][strip % kStripStages];
  }

  // Tells which of the 16 rows of a strip see a key: bit i belongs to row first_row + i.
  __device__ __forceinline__ unsigned live_rows(const WorkTile& work, int first_row) const {
    if constexpr (Config::kMasked) {
      const auto* g_live =
          reinterpret_cast<const uint16_t*>(&p.args.group_of(work.sequence, first_row).live);
      return g_live[first_row % kAttentionBackwardRowPad / 16];
    } else {
      return ~0u << max(0, min(work.span.first_row - first_row, 16));
    }
  }

  // Scale and round the sums of a strip. The stage of the strip holds dQ^T in the order of wgmma's
  // accumulators. Rows that see no key become 0, because their sums may be NaN.
  __device__ __forceinline__ void round_strip(unsigned live, int strip) const {
    using T = typename Config::T;
    constexpr int kWarps = 4;  // each warp of a warpgroup has stored 16 columns
    // NOTE: the asm keeps the compiler from computing addresses before the loops, because the warp
    // has only 24 registers per thread.
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int lane = thread % kWarp;
    const float scale = p.args.params.scale;
    const float4* const s_sums = reinterpret_cast<const float4*>(strip_stage(strip)) + lane;
    const uint32_t s_row = box_address() + transposed_lane_offset(lane, strip * 16, 0);
    live >>= lane % 4 * 2;
    const auto round = [&](uint32_t* to, const float4& sum, int row) {
      const bool low = live >> row & 1, high = live >> (row + 1) & 1;
      to[0] = pack_pair<T>(low ? sum.x * scale : 0.f, high ? sum.y * scale : 0.f);
      to[1] = pack_pair<T>(low ? sum.z * scale : 0.f, high ? sum.w * scale : 0.f);
    };
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += 2) {
      float4 r[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i / 2][i % 2] = s_sums[i % 2 * 128 + (warp + i / 2) * kWarp];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t words[4];
        round(words, r[i][0], 0);
        round(words + 2, r[i][1], 8);
        store_matrix_4_transposed(s_row ^ (warp + i) << 5, words);
      }
    }
  }

  // Drop the 128 bytes at g_at from the L2 cache without writing them to memory.
  static __device__ __forceinline__ void discard_from_cache(const float* g_at) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(g_at) : "memory");
  }
};
#endif

}  // namespace torchweld
