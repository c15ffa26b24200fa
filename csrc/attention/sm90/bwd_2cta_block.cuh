// The 2-CTA kernel of attention's backward on Hopper, for larger head dims up to 256: its
// configuration, its shared memory and its producer warps. The producer warps load tiles for both
// CTAs and send dS to the peer CTA.
#pragma once

#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"

namespace torchweld {

template <typename Config>
struct Backward2CtaShared;

template <typename T_, int kTile, typename Args_>
struct Backward2CtaConfig {
  using T = T_;
  using Args = Args_;
  using Params = BackwardSm90Params<Args>;
  using Shared = Backward2CtaShared<Backward2CtaConfig>;
  static constexpr bool kMasked = kIsMasked<Args>, kCapped = kIsCapped<Args>, kDropout = false;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, KeyRange32, SequenceSpan>>;
  static constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  static constexpr int kCtas = kShape.blocks;
  static constexpr int kDim = kShape.dim;
  // kCtaKeys is the number of keys of a CTA. kKeys is the number of keys of the cluster.
  static constexpr int kCtaKeys = kShape.keys, kKeys = kCtas * kCtaKeys;
  static constexpr int kRows = kShape.rows, kScoreRows = kRows / 2;
  static constexpr bool kStatSlice = kShape.has_stat_slice(kMasked, kCapped, kDropout);
  static_assert(!kStatSlice);
  static constexpr bool kEarlyLse = !kMasked;  // whether lse is loaded before S is complete
  // kStages is the number of stages of Q. dO has one stage.
  static constexpr int kThreads = kShape.kThreads, kStages = kShape.kStages;
  // A TMA box has 64 columns. Its rows are the keys of a CTA or the rows of a query tile.
  static constexpr int kBoxColumns = kShape.kBoxColumns, kBoxes = kDim / kBoxColumns,
                       kBoxesV = kBoxes;
  static constexpr int kKeyBoxBytes = kCtaKeys * kSwizzleRowBytes,
                       kQueryBoxBytes = kRows * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kBoxes * kKeyBoxBytes, kQueryBytes = kBoxes * kQueryBoxBytes;
  static constexpr int kScoreBytes = kRows * kSwizzleRowBytes;  // P or dS, for 64 keys
  // Each warpgroup of the cluster computes a slice of dQ^T with 64 columns, in kDqFloats
  // accumulators per thread.
  static constexpr int kDqSlices = kBoxes, kDqStoreWarps = 1;
  static constexpr int kDqRows = kRows, kDqFloats = kDqRows / 2;
  static constexpr int kDqSliceBytes = kDqFloats * 128 * 4;
  static __device__ __forceinline__ int cta_rank() { return static_cast<int>(rank_in_cluster()); }
  // first_key is the first key of a warpgroup's scores. first_row is the first row of these scores
  // in the query tile.
  static __device__ __forceinline__ int first_key(const WorkTile& work, int /*warpgroup*/) {
    return work.first_key + cta_rank() * kCtaKeys;
  }
  static __device__ __forceinline__ int first_row(int warpgroup) { return warpgroup * kScoreRows; }
  static __device__ __forceinline__ const WorkTile& work_tile(const Shared& s, int /*stage*/) {
    return s.work;
  }
  static __device__ __forceinline__ const float* lse_tile(const Shared& s, int stage) {
    return s.lse[stage];
  }
  static_assert(kDim == 256 && kCtaKeys == 64 && kRows == 64 && kCtas == 2);
  static_assert(kRows == kAttentionBackwardRowPad);
};

template <typename Config>
struct Backward2CtaShared {
  static constexpr int kStages = Config::kStages;
  // Half of the columns of the peer's K. This CTA computes dQ for these columns.
  alignas(kSwizzleAtomBytes) char k_peer[Config::kBoxes / 2 * Config::kKeyBoxBytes];
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char dout[1][Config::kQueryBytes];
  // Holds P, until both warpgroups have read P. Then the peer's dS overwrites P.
  alignas(kSwizzleAtomBytes) char p_or_peer_ds[Config::kScoreBytes];
  alignas(kSwizzleAtomBytes) char ds[Config::kScoreBytes];
  alignas(128) float dq[Config::kDqStoreWarps][2][Config::kDqFloats * 128];
  alignas(128) float lse[kStages][Config::kRows];
  alignas(128) float delta[1][Config::kRows];
  BackwardSm90Seen<Config> seen[kStages];
  PipelineBarriers<kStages> q_pipeline;
  PipelineBarriers<1> dout_pipeline;
  uint64_t k_full, v_full;
  uint64_t ds_wanted;  // the peer has read its P, so this CTA's dS may overwrite that P
  uint64_t ds_full;    // the peer's dS has arrived in this CTA
  uint64_t ds_sent;    // this CTA's dS has arrived in the peer
  alignas(8) typename Config::WorkTile work;
  int2 query_tiles[Config::kStages];  // see BackwardQueryTile
};

// Named barriers of the 2-CTA kernel, in addition to those of BackwardSm90Barrier. They reuse the
// numbers of the second dQ store warp, which this kernel does not have.
enum Backward2CtaBarrier : int {
  kPWritten = 5,      // both warpgroups have written P
  kDsReady = 6,       // both warpgroups have written dS, so it may be sent
  kDsConsumedWg0 = 9  // 9, 10: the dQ products of warpgroup 0, 1 no longer read dS
};
// The number of threads of the two consumer warpgroups plus the warp that sends dS.
inline constexpr int kBackwardSendThreads = kBackwardConsumerThreads + 32;

#if TW_HAS_WGMMA
// One lane loads K and V once, and Q, dO, lse and delta of every query tile. Each CTA loads every
// second box of Q and dO and multicasts these boxes to both CTAs. `leads` is true for the lane that
// loads. Under a general mask, all lanes of the warp call this function, because each lane prepares
// the keys of two rows.
template <typename Config>
__device__ __forceinline__ void backward_2cta_load(const typename Config::Params& p,
                                                   typename Config::Shared& s, bool leads) {
  constexpr int kRows = Config::kRows, kCtas = Config::kCtas, kBoxes = Config::kBoxes;
  const typename Config::WorkTile& work = s.work;
  const int steps = s.work.steps();
  if (steps == 0) return;
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  const int rows = static_cast<int>(p.args.rows);
  const int rank = Config::cta_rank();
  PipelineState<Config::kStages> q_state;
  PipelineState<1> dout_state;
  BackwardTileIterator tiles(work);
  const auto load_kv = [&](char* s_kv, const TensorMap& map, uint64_t* s_full, int first_box,
                           int boxes, int cta) {
#pragma unroll
    for (int box = 0; box < boxes; ++box) {
      tma_load(shared_address(s_kv) + box * Config::kKeyBoxBytes, map, s_full,
               (first_box + box) * Config::kBoxColumns, work.first_key + cta * Config::kCtaKeys,
               work.head_kv, work.sequence);
    }
  };
  const auto load_tile = [&](char* s_tile, float* s_stats, const TensorMap& map,
                             const float* g_stats, uint64_t* s_full) {
#pragma unroll
    for (int i = 0; i < kBoxes / kCtas; ++i) {
      const int box = i * kCtas + rank, column = box * Config::kBoxColumns;
      const uint32_t s_box = shared_address(s_tile) + box * Config::kQueryBoxBytes;
      tma_load_multicast(s_box, map, s_full, column, tiles.tile * kRows,
                         tiles.head - work.sequence * nheads, work.sequence, 3);
    }
    bulk_load(s_stats, g_stats + int64_t{tiles.head} * rows + tiles.tile * kRows, kRows * 4,
              s_full);
  };
  constexpr int kStatBytes = kRows * 4;
  for (int step = 0; step < steps;
       ++step, q_state.advance(), dout_state.advance(), tiles.advance()) {
    uint64_t* s_full = backward_sm90_acquire_q<Config>(p, s, work, tiles.head, tiles.tile, q_state,
                                                       Config::kQueryBytes + kStatBytes, leads);
    if (!leads) continue;
    load_tile(s.q[q_state.stage], s.lse[q_state.stage], p.query, p.args.g_lse, s_full);
    if (step == 0) {
      mbarrier_arrive_expect_tx(&s.k_full, (kBoxes + kBoxes / 2) * Config::kKeyBoxBytes);
      load_kv(s.k, p.key, &s.k_full, 0, kBoxes, rank);
      load_kv(s.k_peer, p.key, &s.k_full, rank * (kBoxes / 2), kBoxes / 2, rank ^ 1);
    }
    s_full = s.dout_pipeline.acquire(dout_state, Config::kQueryBytes + kStatBytes);
    load_tile(s.dout[0], s.delta[0], p.dout, p.args.g_delta, s_full);
    if (step == 0) {
      mbarrier_arrive_expect_tx(&s.v_full, Config::kKeyBytes);
      load_kv(s.v, p.value, &s.v_full, 0, kBoxes, rank);
    }
  }
}

// Sends dS of every query tile to the peer CTA. In the peer, dS overwrites P. One warp runs this
// function.
template <typename Config>
__device__ __forceinline__ void backward_2cta_send_ds(typename Config::Shared& s) {
  const int steps = s.work.steps();
  const uint32_t peer = Config::cta_rank() ^ 1;
  PipelineState<1> state;
  for (int step = 0; step < steps; ++step) {
    named_barrier_wait(kDsReady, kBackwardSendThreads);
    if (threadIdx.x % kWarp == 0) {
      mbarrier_wait(&s.ds_wanted, state.parity);
      bulk_send_to_block(s.p_or_peer_ds, s.ds, Config::kScoreBytes, &s.ds_full, peer);
    }
    __syncwarp();
    state.advance();
  }
}
#endif

}  // namespace torchweld
