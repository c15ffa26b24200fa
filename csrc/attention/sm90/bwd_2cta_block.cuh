// A block of attention's gradient on Hopper above 128 columns: its types and shared memory, and
// what its producer warpgroup does otherwise: it loads tiles for both blocks and sends dS.
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
  static constexpr bool kMasked = kIsMasked<Args>;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, LiveKeys, LiveSpan>>;
  static constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  static constexpr int kBlocks = kShape.blocks;  // of a cluster, which has kKeys keys
  static constexpr int kDim = kShape.dim, kBlockKeys = kShape.keys, kKeys = kBlocks * kBlockKeys;
  static constexpr int kRows = kShape.rows, kScoreRows = kRows / 2;
  static constexpr int kThreads = kShape.kThreads, kStages = kShape.kStages;  // of Q; dO has one
  static constexpr int kLineElems = kShape.kBoxColumns, kLines = kDim / kLineElems;
  // Lines that K and Q are loaded and scores computed of, and all of V and dO. In lines that aren't
  // loaded anything may be: they become columns of dK and dQ that nobody reads.
  static constexpr int kDepthLines = kShape.head_dim / kLineElems,
                       kValueLines = kShape.head_dim_v / kLineElems;
  // Bytes: of 64 columns of a block's keys and of query rows, and of all columns.
  static constexpr int kKeyStretch = kBlockKeys * kSwizzleRowBytes,
                       kRowStretch = kRows * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kLines * kKeyStretch, kRowBytes = kLines * kRowStretch;
  static constexpr int kValueBytes = kValueLines * kKeyStretch,
                       kDoutBytes = kValueLines * kRowStretch;
  static constexpr int kScoreBytes = kRows * kSwizzleRowBytes;  // of P or dS: 64 keys
  // A warpgroup's share of dQ^T: 64 columns. The cluster's warpgroups have one each.
  static constexpr int kShares = kLines, kAdders = 1;
  static constexpr int kShareRows = kRows, kShareFloats = kShareRows / 2;  // of a thread
  static constexpr int kShareBytes = kShareFloats * 128 * 4;
  static __device__ __forceinline__ int rank() { return static_cast<int>(rank_in_cluster()); }
  // Where a warpgroup's scores are.
  static __device__ __forceinline__ int first_key(const WorkTile& work, int /*warpgroup*/) {
    return work.first_key + rank() * kBlockKeys;
  }
  static __device__ __forceinline__ int first_row(int warpgroup) { return warpgroup * kScoreRows; }
  static_assert(kDim == 256 && kBlockKeys == 64 && kRows == 64 && kBlocks == 2);
  static_assert(kRows == kAttentionBackwardRowPad);
};

template <typename Config>
struct Backward2CtaShared {
  static constexpr int kStages = Config::kStages;
  // The block's half of the columns of the neighbour's keys.
  alignas(kSwizzleAtomBytes) char k_neighbour[Config::kLines / 2 * Config::kKeyStretch];
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kValueBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kRowBytes];
  alignas(kSwizzleAtomBytes) char dout[1][Config::kDoutBytes];
  // P; the neighbour's dS comes here when P has been read.
  alignas(kSwizzleAtomBytes) char probabilities[Config::kScoreBytes];
  alignas(kSwizzleAtomBytes) char ds[Config::kScoreBytes];
  alignas(128) float dq[Config::kAdders][2][Config::kShareFloats * 128];
  alignas(128) float lse[kStages][Config::kRows];
  alignas(128) float delta[1][Config::kRows];
  BackwardSm90Seen<Config> seen[kStages];
  PipelineBarriers<kStages> q_pipeline;
  PipelineBarriers<1> dout_pipeline;
  uint64_t k_full, v_full;
  // This block's dS may go to the neighbour, whose warps have read P; the neighbour's is here; this
  // block's has arrived there.
  uint64_t ds_wanted, ds_full, ds_sent;
  alignas(8) typename Config::WorkTile work;
};

// Named barriers beside those of BackwardSm90Barrier: both consumers have written P; dS may be
// sent; a warpgroup is done with both blocks' dS.
enum Backward2CtaBarrier : int {
  kProbabilitiesWritten = 5,
  kSend = 6,
  kShareDone = 9  // and 10
};
inline constexpr int kBackwardSendThreads = kBackwardConsumers + 32;  // and the warp that sends

#if TW_HAS_WGMMA
// One lane's loads of the block's keys and of all its query tiles. Of a query tile the blocks of a
// cluster load some columns each, for both.
template <typename Config>
__device__ __forceinline__ void backward_wide_load(const typename Config::Params& p,
                                                   typename Config::Shared& s) {
  constexpr int kRows = Config::kRows, kBlocks = Config::kBlocks, kLines = Config::kLines;
  constexpr int kDepthLines = Config::kDepthLines, kValueLines = Config::kValueLines;
  const typename Config::WorkTile& work = s.work;
  const int steps = s.work.steps();
  if (steps == 0) return;
  const int nheads = static_cast<int>(p.args.params.sizes.nheads);
  const int rows = static_cast<int>(p.args.rows);
  const int rank = Config::rank();
  PipelineState<Config::kStages> at;
  PipelineState<1> dout_at;
  BackwardWalk walk(work);
  const auto load_keys = [&](char* s_to, const TensorMap& map, uint64_t* s_full, int first_line,
                             int lines, int block) {
#pragma unroll
    for (int line = 0; line < lines; ++line) {
      tma_load(shared_address(s_to) + line * Config::kKeyStretch, map, s_full,
               (first_line + line) * Config::kLineElems,
               work.first_key + block * Config::kBlockKeys, work.head_kv, work.sequence);
    }
  };
  const auto load_rows = [&](char* s_to, float* s_stats, const TensorMap& map, const float* g_stats,
                             uint64_t* s_full, int lines) {
#pragma unroll
    for (int i = 0; i < (lines + kBlocks - 1) / kBlocks; ++i) {
      const int line = i * kBlocks + rank, x = line * Config::kLineElems;
      if (line >= lines) break;
      const uint32_t s_line = shared_address(s_to) + line * Config::kRowStretch;
      tma_load_multicast(s_line, map, s_full, x, walk.tile * kRows,
                         walk.head - work.sequence * nheads, work.sequence, 3);
    }
    bulk_load(s_stats, g_stats + int64_t{walk.head} * rows + walk.tile * kRows, kRows * 4, s_full);
  };
  constexpr int kStatBytes = kRows * 4;
  constexpr int kSeenBytes = sizeof(RowGroup) + kRows * sizeof(RowRange);
  for (int step = 0; step < steps; ++step) {
    uint64_t* s_full = s.q_pipeline.acquire(
        at, kDepthLines * Config::kRowStretch + kStatBytes + (Config::kMasked ? kSeenBytes : 0));
    if constexpr (Config::kMasked) {
      auto& s_seen = s.seen[at.stage];
      bulk_load(&s_seen.group, &p.args.group_of(work.sequence, walk.tile * kRows),
                sizeof(s_seen.group), s_full);
      bulk_load(s_seen.live, &p.args.live_of(work.sequence, walk.tile * kRows), sizeof(s_seen.live),
                s_full);
    }
    load_rows(s.q[at.stage], s.lse[at.stage], p.query, p.args.g_lse, s_full, kDepthLines);
    if (step == 0) {
      mbarrier_arrive_expect_tx(&s.k_full, (kDepthLines + kLines / 2) * Config::kKeyStretch);
      load_keys(s.k, p.key, &s.k_full, 0, kDepthLines, rank);
      load_keys(s.k_neighbour, p.key, &s.k_full, rank * (kLines / 2), kLines / 2, rank ^ 1);
    }
    s_full = s.dout_pipeline.acquire(dout_at, Config::kDoutBytes + kStatBytes);
    load_rows(s.dout[0], s.delta[0], p.dout, p.args.g_delta, s_full, kValueLines);
    if (step == 0) {
      mbarrier_arrive_expect_tx(&s.v_full, Config::kValueBytes);
      load_keys(s.v, p.value, &s.v_full, 0, kValueLines, rank);
    }
    at.advance();
    dout_at.advance();
    walk.advance();
  }
}

// One warp's copies of dS to the neighbour.
template <typename Config>
__device__ __forceinline__ void backward_wide_send(typename Config::Shared& s) {
  const int steps = s.work.steps();
  const uint32_t neighbour = Config::rank() ^ 1;
  PipelineState<1> at;
  for (int step = 0; step < steps; ++step) {
    named_barrier_wait(kSend, kBackwardSendThreads);
    if (threadIdx.x % kWarp == 0) {
      mbarrier_wait(&s.ds_wanted, at.parity);
      bulk_send_to_block(s.probabilities, s.ds, Config::kScoreBytes, &s.ds_full, neighbour);
    }
    __syncwarp();
    at.advance();
  }
}
#endif

}  // namespace torchweld
