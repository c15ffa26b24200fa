// The producer warps of attention's backward on Hopper. One warp draws work tiles and loads Q, K, V
// and dO. In the 2-CTA kernel, another warp sends dS to the peer CTA.
#pragma once

#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The producer warp. Under a general mask, all its lanes loop over the query tiles, because each
// lane prepares the keys of two rows. Without one, only the lane that loads does.
template <typename Config>
struct BackwardSm90Producer {
  using WorkTile = typename Config::WorkTile;
  using Tiles = BackwardTileIterator<WorkTile>;
  using QState = PipelineState<Config::kStages>;
  static constexpr int kRows = Config::kRows, kBoxes = Config::kBoxes, kBoxesV = Config::kBoxesV;

  const typename Config::Params& p;
  typename Config::Shared& s;

  // Draws and loads all work tiles of a persistent CTA. The loads of the next work tile start while
  // the consumers still process the last query tiles.
  __device__ __forceinline__ void run() const {
    const bool leads = elect_one();  // whether this lane loads
    // NOTE: the counts stay in shared memory, because the warp has only 24 registers per thread.
    BackwardProducerCounts& counts = s.producer_counts;
    if (leads) counts = {0, 0};
    __syncwarp();
    const auto work_state = [&] { return pipeline_state_of<kWorkStages>(counts.work_tiles); };
    for (;;) {
      WorkTile& work = s.work[work_state().stage];
      mbarrier_wait(&s.work_pipeline.empty[work_state().stage], work_state().parity ^ 1);
      if (leads) {
        work.template get_work<Config>(p.args, p.args.g_tickets);
        work.first_step = counts.steps;
        mbarrier_arrive(&s.work_pipeline.full[work_state().stage]);
      }
      __syncwarp();
      if (work.is_end()) break;
      if (leads || Config::kMasked) {
        load_work_tile(work, counts.steps, backward_sm90_kv_state(work_state()), leads);
      }
      __syncwarp();
      if (leads) counts = {counts.work_tiles + 1, counts.steps + work.steps()};
      __syncwarp();
    }
  }

  // Loads the work tile of a CTA of the 2-CTA kernel.
  __device__ __forceinline__ void run_2cta() const {
    const bool leads = elect_one();
    if (!leads && !Config::kMasked) return;
    constexpr int kStatBytes = kRows * 4;
    const WorkTile& work = s.work[0];
    const int steps = work.steps();
    if (steps == 0) return;
    const int nheads = static_cast<int>(p.args.params.sizes.nheads);
    const int rows = static_cast<int>(p.args.rows);
    const int rank = Config::cta_rank();
    QState q_state;
    PipelineState<1> dout_state;
    Tiles tiles(work);
    const auto load_tile = [&](char* s_tile, float* s_stats, const TensorMap& map,
                               const float* g_stats, uint64_t* s_full) {
      load_rows<kBoxes>(s_tile, map, s_full, tiles, nheads, rank);
      bulk_load(s_stats, g_stats + int64_t{tiles.head} * rows + tiles.tile * kRows, kStatBytes,
                s_full);
    };
    for (int step = 0; step < steps;
         ++step, q_state.advance(), dout_state.advance(), tiles.advance()) {
      uint64_t* s_full = acquire_q(tiles, q_state, Config::kQueryBytes + kStatBytes, leads);
      if (!leads) continue;
      load_tile(s.q[q_state.stage], s.lse[q_state.stage], p.query, p.args.g_lse, s_full);
      if (step == 0) {
        mbarrier_arrive_expect_tx(&s.k_full, sizeof(s.k) + sizeof(s.k_peer));
        load_keys<kBoxes>(s.k, p.key, &s.k_full, work, 0, rank);
        load_keys<kBoxes / 2>(s.k_peer, p.key, &s.k_full, work, rank * (kBoxes / 2), rank ^ 1);
      }
      s_full = s.dout_pipeline.acquire(dout_state, Config::kDoutBytes + kStatBytes);
      load_tile(s.dout[0], s.delta[0], p.dout, p.args.g_delta, s_full);
      if (step == 0) {
        mbarrier_arrive_expect_tx(&s.v_full, sizeof(s.v));
        load_keys<kBoxes>(s.v, p.value, &s.v_full, work, 0, rank);
      }
    }
  }

 private:
  // Loads K and V of a work tile, and Q, dO, lse and delta of each of its query tiles. `step` is
  // the number of query tiles that have been loaded for earlier work tiles. `kv_state` is the stage
  // and the phase of the pipelines of K and V.
  __device__ __forceinline__ void load_work_tile(const WorkTile& work, unsigned step,
                                                 const PipelineState<1>& kv_state,
                                                 bool leads) const {
    int left = work.steps();
    const int rows = static_cast<int>(p.args.rows);
    const int nheads = static_cast<int>(p.args.params.sizes.nheads);
    Tiles tiles(work);
    if (left == 0 && leads) {
      s.k_pipeline.acquire(kv_state, 0);
      s.v_pipeline.acquire(kv_state, 0);
    }
    int q_bytes = Config::kQueryBytes, dout_bytes = Config::kDoutBytes;
    if constexpr (Config::kStatSlice) {
      q_bytes += sizeof(s.stats[0].values);
    } else {
      q_bytes += sizeof(s.stats[0].lse);
      dout_bytes += sizeof(s.stats[0].delta);
    }
    if constexpr (Config::kBias) {
      if (!p.args.params.mask.bias.has_one_row()) dout_bytes += Config::kBiasBytes;
    }
    for (bool is_first = true; left > 0; --left, ++step, is_first = false, tiles.advance()) {
      const QState state = pipeline_state_of<Config::kStages>(step);
      const int first_row = tiles.head * rows + tiles.tile * kRows;
      uint64_t* s_full = acquire_q(tiles, state, q_bytes, leads);
      if (!leads) continue;
      load_rows<kBoxes>(s.q[state.stage], p.query, s_full, tiles, nheads, 0);
      auto& s_stats = s.stats[state.stage];
      if constexpr (Config::kStatSlice) {
        bulk_load(s_stats.values, p.args.g_stat_slice + first_row, sizeof(s_stats.values), s_full);
      } else {
        bulk_load(s_stats.lse, p.args.g_lse + first_row, sizeof(s_stats.lse), s_full);
      }
      if (is_first) {
        uint64_t* s_k_full = s.k_pipeline.acquire(kv_state, Config::kKeyBytes);
        load_keys<kBoxes>(s.k, p.key, s_k_full, work, 0, 0);
      }
      const auto dout_state = pipeline_state_of<Config::kDoutStages>(step);
      s_full = s.dout_pipeline.acquire(dout_state, dout_bytes);
      load_rows<kBoxesV>(s.dout[dout_state.stage], p.dout, s_full, tiles, nheads, 0);
      if constexpr (Config::kBias) {
        if (!p.args.params.mask.bias.has_one_row()) {
          load_bias(dout_state.stage, s_full, tiles, nheads);
        }
      }
      if constexpr (!Config::kStatSlice) {
        bulk_load(s_stats.delta, p.args.g_delta + first_row, sizeof(s_stats.delta), s_full);
      }
      if (is_first) {
        uint64_t* s_v_full = s.v_pipeline.acquire(kv_state, Config::kValueBytes);
        load_keys<kBoxesV>(s.v, p.value, s_v_full, work, 0, 0);
      }
    }
  }

  // Waits for a free stage of Q and writes what the consumers must know about the query tile. Then
  // the lane that loads expects `bytes` bytes in the stage, loads the tile's BlockMask if there is
  // one, and returns the stage's full barrier.
  __device__ __forceinline__ uint64_t* acquire_q(const Tiles& tiles, const QState& state, int bytes,
                                                 bool leads) const {
    const WorkTile& work = tiles.work;
    if constexpr (Config::kMasked) {
      auto& s_seen = s.seen[state.stage];
      const uint32_t keys = seen_keys_of_lane(work, tiles.tile);
      mbarrier_wait(&s.q_pipeline.empty[state.stage], state.parity ^ 1);
      s_seen.keys[threadIdx.x % kWarp] = keys;
      __syncwarp();
      if (!leads) return nullptr;
      if constexpr (Config::kDropout) {
        s_seen.head = tiles.head;
        s_seen.first_row = tiles.tile * kRows;
      }
      if constexpr (Config::kAlibi) {
        const MaskParams& mask = p.args.params.mask;
        const int nheads = static_cast<int>(p.args.params.sizes.nheads);
        s_seen.slope = mask.alibi_slope(tiles.head - work.sequence * nheads);
        s_seen.position = mask.position(tiles.tile * kRows, mask.sequence<int>(work.sequence).end);
      }
      uint64_t* s_full = s.q_pipeline.acquire(state, bytes + sizeof(BlockMask));
      bulk_load(&s_seen.group, &p.args.group_of(work.sequence, tiles.tile * kRows),
                sizeof(BlockMask), s_full);
      return s_full;
    } else {
      mbarrier_wait(&s.q_pipeline.empty[state.stage], state.parity ^ 1);
      s.query_tiles[state.stage] = pack_query_tile<Config>(p.args.params.mask, work, tiles.tile);
      return s.q_pipeline.acquire(state, bytes);
    }
  }

  // Returns the word of BackwardSm90Seen::keys that this lane writes.
  __device__ __forceinline__ uint32_t seen_keys_of_lane(const WorkTile& work, int tile) const {
    static_assert(kRows == 2 * kWarp && Config::kKeys < 256);
    const KeyRange32* g_live = &p.args.live_of(work.sequence, tile * kRows);
    const int4 live = reinterpret_cast<const int4*>(g_live)[threadIdx.x % kWarp];
    const auto pack = [&](int begin, int end) -> uint32_t {
      begin = max(0, min(begin - work.first_key, Config::kKeys));
      end = max(begin, min(end - work.first_key, Config::kKeys));
      return begin | (end - begin) << 8;
    };
    return pack(live.x, live.y) | pack(live.z, live.w) << 16;
  }

  // Loads boxes of K or V, starting with box `first_box`. They have the keys of CTA `cta`.
  template <int kCount>
  __device__ __forceinline__ void load_keys(char* s_keys, const TensorMap& map, uint64_t* s_full,
                                            const WorkTile& work, int first_box, int cta) const {
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
      tma_load(shared_address(s_keys) + box * Config::kKeyBoxBytes, map, s_full,
               (first_box + box) * Config::kBoxColumns, work.first_key + cta * Config::kCtaKeys,
               work.head_kv, work.sequence);
    }
  }

  // Loads the bias of a query tile.
  __device__ __forceinline__ void load_bias(int stage, uint64_t* s_full, const Tiles& tiles,
                                            int nheads) const {
#pragma unroll
    for (int i = 0; i < Config::kCtaKeys / 64; ++i) {
      tma_load(shared_address(s.bias.tiles[stage]) + i * Config::kBiasBoxBytes, p.of_bias.bias,
               s_full, tiles.work.first_key + i * 64, tiles.tile * kRows,
               tiles.head - tiles.work.sequence * nheads, tiles.work.sequence);
    }
  }

  // Loads the boxes of a query tile of Q or dO. Each of two CTAs loads every second box and
  // multicasts it to both CTAs.
  template <int kCount>
  __device__ __forceinline__ void load_rows(char* s_rows, const TensorMap& map, uint64_t* s_full,
                                            const Tiles& tiles, int nheads, int rank) const {
#pragma unroll
    for (int i = 0; i < kCount / Config::kCtas; ++i) {
      const int box = i * Config::kCtas + rank, column = box * Config::kBoxColumns;
      const uint32_t s_box = shared_address(s_rows) + box * Config::kQueryBoxBytes;
      if constexpr (Config::kCtas == 1) {
        tma_load(s_box, map, s_full, column, tiles.tile * kRows,
                 tiles.head - tiles.work.sequence * nheads, tiles.work.sequence);
      } else {
        tma_load_multicast(s_box, map, s_full, column, tiles.tile * kRows,
                           tiles.head - tiles.work.sequence * nheads, tiles.work.sequence, 3);
      }
    }
  }
};

// Draws the work tile of a cluster. CTA 0 draws it, and CTA 1 copies it.
template <typename Config>
__device__ __forceinline__ void backward_2cta_get_work(const typename Config::Params& p,
                                                       Backward2CtaShared<Config>& s) {
  if (Config::cta_rank() == 0 && threadIdx.x == 0) {
    s.work[0].template get_work<Config>(p.args, p.args.g_tickets);
  }
  cluster_arrive();
  cluster_wait();
  constexpr int kPairs = sizeof(s.work) / sizeof(float2);
  static_assert(sizeof(s.work) % sizeof(float2) == 0);
  float2* s_work = reinterpret_cast<float2*>(s.work);
  if (Config::cta_rank() != 0 && threadIdx.x < kPairs) {
    s_work[threadIdx.x] = load_from_block(s_work + threadIdx.x, 0);
  }
  __syncthreads();
}

// Sends dS of every query tile to the peer CTA. In the peer, dS overwrites P. One warp runs this
// function.
template <typename Config>
__device__ __forceinline__ void backward_2cta_send_ds(Backward2CtaShared<Config>& s) {
  const int steps = s.work[0].steps();
  const uint32_t peer = Config::cta_rank() ^ 1;
  PipelineState<1> state;
  for (int step = 0; step < steps; ++step) {
    named_barrier_wait(kDsReady, kBackwardSendThreads);
    if (threadIdx.x % kWarp == 0) {
      mbarrier_wait(&s.ds_wanted, state.parity);
      bulk_send_to_block(s.p_or_peer_ds, s.ds[0], Config::kDsBytes, &s.ds_full, peer);
    }
    __syncwarp();
    state.advance();
  }
}
#endif

}  // namespace torchweld
