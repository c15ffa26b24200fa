// The producer warp of attention's backward on Hopper, which loads Q, K, V and dO.
#pragma once

#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// Loads K and V of a work tile, and Q and dO of each of its query tiles. `step` is the number of
// query tiles that have been loaded for earlier work tiles. `kv_state` is the stage and the phase
// of the pipelines of K and V. `leads` is true for the lane that loads. Under a general mask, all
// lanes of the warp call this function, because each lane prepares the keys of two rows.
template <typename Config>
__device__ __forceinline__ void backward_sm90_load_tiles(const typename Config::Params& p,
                                                         BackwardSm90Shared<Config>& s,
                                                         const typename Config::WorkTile& work,
                                                         unsigned step,
                                                         const PipelineState<1>& kv_state,
                                                         bool leads) {
  constexpr int kRows = Config::kRows;
  int left = work.steps();
  const int rows = static_cast<int>(p.args.rows);
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  constexpr std::integral_constant<int, Config::kBoxes> boxes_qk;
  constexpr std::integral_constant<int, Config::kBoxesV> boxes_v;
  BackwardTileIterator tiles(work);
  if (left == 0 && leads) {
    s.k_pipeline.acquire(kv_state, 0);
    s.v_pipeline.acquire(kv_state, 0);
  }
  const auto load_kv = [&](char* s_kv, const TensorMap& map, PipelineBarriers<1>& pipeline,
                           auto boxes) {
    uint64_t* s_full = pipeline.acquire(kv_state, boxes.value * Config::kKeyBoxBytes);
#pragma unroll
    for (int box = 0; box < boxes.value; ++box) {
      tma_load(shared_address(s_kv) + box * Config::kKeyBoxBytes, map, s_full,
               box * Config::kBoxColumns, work.first_key, work.head_kv, work.sequence);
    }
  };
  const auto load_tile = [&](char* s_tile, const TensorMap& map, uint64_t* s_full, auto boxes) {
#pragma unroll
    for (int box = 0; box < boxes.value; ++box) {
      tma_load(shared_address(s_tile) + box * Config::kQueryBoxBytes, map, s_full,
               box * Config::kBoxColumns, tiles.tile * kRows, tiles.head - work.sequence * nheads,
               work.sequence);
    }
  };
  using Stats = std::remove_reference_t<decltype(s.stats[0])>;
  int q_bytes = Config::kQueryBytes, dout_bytes = Config::kDoutBytes;
  if constexpr (Config::kStatSlice) {
    q_bytes += Stats::kBytes;
  } else {
    q_bytes += Stats::kLseBytes;
    dout_bytes += Stats::kDeltaBytes;
  }
  for (bool is_first = true; left > 0; --left, ++step, is_first = false, tiles.advance()) {
    const auto state = pipeline_state_of<Config::kStages>(step);
    const int first_row = tiles.head * rows + tiles.tile * kRows;
    uint64_t* s_full =
        backward_sm90_acquire_q<Config>(p, s, work, tiles.head, tiles.tile, state, q_bytes, leads);
    if (!leads) continue;
    load_tile(s.q[state.stage], p.query, s_full, boxes_qk);
    Stats& s_stats = s.stats[state.stage];
    if constexpr (Config::kStatSlice) {
      bulk_load(s_stats.values, p.args.g_stat_slice + first_row, Stats::kBytes, s_full);
    } else {
      bulk_load(s_stats.lse, p.args.g_lse + first_row, Stats::kLseBytes, s_full);
    }
    if (is_first) load_kv(s.k, p.key, s.k_pipeline, boxes_qk);
    s_full = s.dout_pipeline.acquire(state, dout_bytes);
    load_tile(s.dout[state.stage], p.dout, s_full, boxes_v);
    if constexpr (!Config::kStatSlice) {
      bulk_load(s_stats.delta, p.args.g_delta + first_row, Stats::kDeltaBytes, s_full);
    }
    if (is_first) load_kv(s.v, p.value, s.v_pipeline, boxes_v);
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
  const auto work_state = [&] { return pipeline_state_of<kWorkStages>(counts.work_tiles); };
  for (;;) {
    typename Config::WorkTile& work = s.work[work_state().stage];
    mbarrier_wait(&s.work_pipeline.empty[work_state().stage], work_state().parity ^ 1);
    if (leads) {
      work.template get_work<Config>(p.args, p.args.g_tickets);
      work.first_step = counts.steps;
      mbarrier_arrive(&s.work_pipeline.full[work_state().stage]);
    }
    __syncwarp();
    if (work.is_end()) break;
    if (leads || Config::kMasked) {
      backward_sm90_load_tiles(p, s, work, counts.steps, backward_sm90_kv_state(work_state()),
                               leads);
    }
    __syncwarp();
    if (leads) counts = {counts.work_tiles + 1, counts.steps + work.steps()};
    __syncwarp();
  }
}
#endif

}  // namespace torchweld
