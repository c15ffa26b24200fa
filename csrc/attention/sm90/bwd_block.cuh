// Attention backward on Hopper: the configuration, the shared memory, the barriers and the
// positions of tiles.
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
template <typename Config>
struct Backward2CtaShared;

inline constexpr int kWorkStages = 2;  // the number of work tiles that a CTA holds

template <typename T_, int kTile, typename Args_>
struct BackwardSm90Config {
  using T = T_;
  using Args = Args_;
  using Params = BackwardSm90Params<Args>;
  static constexpr bool kMasked = kIsMasked<Args>, kCapped = kIsCapped<Args>,
                        kDropout = kIsDropped<Args>, kBias = kIsBiased<Args>,
                        kAlibi = kIsAlibi<Args>;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, KeyRange32, SequenceSpan>>;
  static constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  // The number of CTAs in a cluster. A work tile has kKeys keys, kCtaKeys in each CTA.
  static constexpr int kCtas = kShape.blocks, kCtaKeys = kShape.keys, kKeys = kCtas * kCtaKeys;
  using Shared = std::conditional_t<kCtas == 1, BackwardSm90Shared<BackwardSm90Config>,
                                    Backward2CtaShared<BackwardSm90Config>>;
  static constexpr int kDim = kShape.dim, kDimV = kShape.dim_v;
  // The columns that the products read or compute, except dQ's.
  static constexpr int kUsed = kShape.used, kUsedV = kShape.used_v();
  // Whether dK has more columns than dV. With one CTA, dK then overwrites K in shared memory. If
  // not, dK overwrites dS, so that the next K can be loaded early. dV overwrites V in either case.
  static constexpr bool kUnequal = kDim > kDimV;
  static constexpr int kRows = kMasked ? kShape.kMaskedRows : kShape.rows;
  static constexpr int kScoreRows = kRows / kCtas;  // the query rows of a warpgroup's scores
  // Whether an additional k-slice of the products for S and dP subtracts lse and delta
  // (StatSliceTile). If not, consumers load lse and delta from shared memory.
  static constexpr bool kStatSlice = kShape.has_stat_slice(kMasked, kCapped, kDropout);
  // Whether lse is loaded before S is complete. An early load of lse needs registers.
  static constexpr bool kEarlyLse = !kStatSlice && !kMasked;
  static constexpr int kThreads = kShape.kThreads;
  static constexpr int kProducerRegisters = kCtas == 1 ? 24 : 40,
                       kConsumerRegisters = kCtas == 1 ? 240 : 232;
  static constexpr int kStages = kShape.kStages, kDoutStages = kShape.dout_stages(kBias);
  // A TMA box has 64 columns, and either all keys of the CTA or the rows of a query tile.
  static constexpr int kBoxColumns = kShape.kBoxColumns, kBoxes = kDim / kBoxColumns,
                       kBoxesV = kDimV / kBoxColumns;
  static constexpr int kKeyBoxBytes = kCtaKeys * kSwizzleRowBytes,
                       kQueryBoxBytes = kRows * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kBoxes * kKeyBoxBytes, kQueryBytes = kBoxes * kQueryBoxBytes;
  static constexpr int kValueBytes = kBoxesV * kKeyBoxBytes, kDoutBytes = kBoxesV * kQueryBoxBytes;
  // The bias of a query tile, as (kCtaKeys / 64, kRows, 64 keys). It belongs to a stage of dO.
  static constexpr int kBiasBoxBytes = kRows * kSwizzleRowBytes,
                       kBiasBytes = kBias ? kCtaKeys / 64 * kBiasBoxBytes : 0;
  // A buffer of dS holds (kCtaKeys / 64, kRows, 64 keys).
  static constexpr int kDsBoxBytes = kRows * kSwizzleRowBytes,
                       kDsBytes = kCtaKeys / 64 * kDsBoxBytes;
  // A warpgroup computes a slice of dQ^T in kDqFloats accumulators per thread. The slice has 64
  // columns of dQ and all rows of the query tile. If dQ has only 64 columns, the slice has half of
  // the rows. If dQ has three slices, the two warpgroups compute the third slice alternately.
  static constexpr int kDqRows = kDim == 64 ? kRows / 2 : kRows, kDqFloats = kDqRows / 2;
  static constexpr int kDqSliceBytes = kDqFloats * 128 * 4, kDqSlices = kDim == 64 ? 2 : kBoxes;
  static constexpr int kCtaDqSlices = kDqSlices / kCtas;
  static constexpr int kDqStoreWarps = kShape.dq_store_warps(), kDsStages = kDqStoreWarps;
  static __device__ __forceinline__ int cta_rank() {
    if constexpr (kCtas == 1) {
      return 0;
    } else {
      return static_cast<int>(rank_in_cluster());
    }
  }
  // A warpgroup's scores have 64 keys and kScoreRows query rows. With one CTA, each warpgroup has
  // other keys. With two CTAs, each CTA has other keys, and each of its warpgroups has other rows.
  // first_key is the first key of the scores. first_row is their first row in the query tile.
  static __device__ __forceinline__ int first_key(const WorkTile& work, int warpgroup) {
    return work.first_key + (kCtas == 1 ? warpgroup : cta_rank()) * 64;
  }
  static __device__ __forceinline__ int first_row(int warpgroup) {
    return kCtas == 1 ? 0 : warpgroup * kScoreRows;
  }
  static_assert(kCtas == 1 ? kDim == 64 || kDim == 128 || kDim == 192 : kDim == 256 && kCtas == 2);
  static_assert(kKeys == 128 && kDqFloats % 4 == 0);
  static_assert((!kMasked && kCtas == 1) || kRows == kAttentionBackwardRowPad);
};

// The keys that the rows of a query tile see. Only used under a general mask. For each row, `keys`
// has the index of the row's first key in the work tile, in 8 bits, and then the number of its
// keys, in 8 bits. A word of `keys` belongs to two rows.
template <typename Config, bool kMasked = Config::kMasked>
struct BackwardSm90Seen {};
template <typename Config>
struct BackwardSm90Seen<Config, true> {
  BlockMask group;
  uint32_t keys[Config::kRows / 2];
  // The head of the query tile, counted over all sequences, and its first row. Only used with
  // dropout and with a bias.
  int head, first_row;
  // The ALiBi slope of the head, and the position of the first row. Only used with ALiBi.
  float slope;
  int position;
};
// lse and delta of the rows of a query tile.
template <int kRows>
struct RowStatsTile {
  alignas(128) float lse[kRows], delta[kRows];
};
// Operand B of a wgmma that subtracts lse and delta from the scores of a query tile. Each query row
// has 8 bfloat16 values. a0 + a1 + a2 is (shift - lse * lse_factor) / score_factor, and d0 + d1 +
// d2 is -delta. Three bfloat16 values hold all 24 bits of a float.
//   B                                          a0 a1 a2 d0 d1 d2 0 0
//   every row of A in the product for S         1  1  1  0  0  0 0 0
//   every row of A in the product for dP        0  0  0  1  1  1 0 0
// Therefore the products give S - lse and dP - delta.
template <int kRows>
struct StatSliceTile {
  alignas(128) uint4 values[kRows];
};

// A dQ store warp rounds dQ of a query tile in strips of 16 rows and 64 columns. While it rounds,
// half of its buffer holds strips of fp32 sums, and the other half receives the 16-bit values of
// all strips. Each stage is used for two strips.
inline constexpr int kDqStripFloats = 16 * 64;
template <typename Config>
inline constexpr int kDqStripStages =
    Config::kDqSliceBytes / 4 / kDqStripFloats * Config::kCtaDqSlices / 2;

// The numbers of work tiles and query tiles that the producer has loaded.
struct BackwardProducerCounts {
  int work_tiles, steps;
};

// The tiles of the bias in shared memory.
template <typename Config, bool kBias = Config::kBias>
struct BackwardBiasTiles {};
template <typename Config>
struct BackwardBiasTiles<Config, true> {
  alignas(kSwizzleAtomBytes) char tiles[Config::kDoutStages][Config::kBiasBytes];
};

template <typename Config>
struct BackwardSm90Shared {
  static constexpr int kStages = Config::kStages;
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kValueBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char dout[Config::kDoutStages][Config::kDoutBytes];
  alignas(kSwizzleAtomBytes) char ds[Config::kDsStages][Config::kDsBytes];
  alignas(kSwizzleAtomBytes) float dq[Config::kDqStoreWarps][Config::kDqSlices]
                                     [Config::kDqFloats * 128];
  std::conditional_t<Config::kStatSlice, StatSliceTile<Config::kRows>, RowStatsTile<Config::kRows>>
      stats[kStages];
  BackwardSm90Seen<Config> seen[kStages];
  int2 query_tiles[kStages];  // see BackwardQueryTile
  BackwardBiasTiles<Config> bias;
  PipelineBarriers<kStages> q_pipeline;
  PipelineBarriers<Config::kDoutStages> dout_pipeline;
  BackwardProducerCounts producer_counts;
  // The number of dS buffers that a warpgroup still uses for dK of the previous work tile. Only one
  // thread of the warpgroup accesses this number. Only used if dK overwrites dS (bwd_consumer.cuh).
  int held_ds_buffers[2];
  PipelineBarriers<Config::kDsStages> ds_pipeline;  // both warpgroups write dS, and both read it
  PipelineBarriers<1> k_pipeline, v_pipeline;
  PipelineBarriers<kWorkStages> work_pipeline;
  uint64_t dq_strip_full[Config::kDqStoreWarps][kDqStripStages<Config>];
  typename Config::WorkTile work[kWorkStages];

  __device__ __forceinline__ const float* lse_of(int stage) const { return stats[stage].lse; }
  __device__ __forceinline__ const float* delta_of(int stage) const { return stats[stage].delta; }
};

// The shared memory of a CTA of the 2-CTA kernel, which processes one work tile.
template <typename Config>
struct Backward2CtaShared {
  static constexpr int kStages = Config::kStages, kDoutStages = Config::kDoutStages;
  // Half of the columns of the peer's K. This CTA computes dQ for these columns.
  alignas(kSwizzleAtomBytes) char k_peer[Config::kKeyBytes / 2];
  alignas(kSwizzleAtomBytes) char k[Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char v[Config::kValueBytes];
  alignas(kSwizzleAtomBytes) char q[kStages][Config::kQueryBytes];
  alignas(kSwizzleAtomBytes) char dout[kDoutStages][Config::kDoutBytes];
  // Holds P, until both warpgroups have read P. Then the peer's dS overwrites P.
  alignas(kSwizzleAtomBytes) char p_or_peer_ds[Config::kDsBytes];
  alignas(kSwizzleAtomBytes) char ds[Config::kDsStages][Config::kDsBytes];
  alignas(128) float dq[Config::kDqStoreWarps][Config::kCtaDqSlices][Config::kDqFloats * 128];
  alignas(128) float lse[kStages][Config::kRows];
  alignas(128) float delta[kDoutStages][Config::kRows];
  BackwardSm90Seen<Config> seen[kStages];
  PipelineBarriers<kStages> q_pipeline;
  PipelineBarriers<kDoutStages> dout_pipeline;
  uint64_t k_full, v_full;
  uint64_t ds_wanted;  // the peer has read its P, so this CTA's dS may overwrite that P
  uint64_t ds_full;    // the peer's dS has arrived in this CTA
  uint64_t ds_sent;    // this CTA's dS has arrived in the peer
  alignas(8) typename Config::WorkTile work[1];
  int2 query_tiles[kStages];  // see BackwardQueryTile

  __device__ __forceinline__ const float* lse_of(int stage) const { return lse[stage]; }
  __device__ __forceinline__ const float* delta_of(int stage) const { return delta[stage]; }
};

// A query tile of the mainloop, as a consumer warpgroup sees it.
struct BackwardQueryTile {
  int tile;
  int unseen_rows;  // the number of the tile's first rows that see no key
  bool is_edge;     // whether the mask hides some of the warpgroup's scores
};

// Packs the fields of a BackwardQueryTile for both warpgroups into two words. The producer calls
// this function if there is no general mask. There are only two words because the consumers read
// them between products, where every load from shared memory takes long.
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

// Iterates over the heads and query tiles of a work tile. If work.tile_steps > 1, all heads process
// a query tile before the next query tile. Otherwise, a head processes all its query tiles, in
// descending order, before the next head.
// NOTE: a CTA that processes several heads one after the other never has ascending query tiles
// (attention_backward_order).
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
  // Both warpgroups have written dS (2-CTA kernel), or no longer read what dK overwrites.
  kDsWritten = 1,
  kUnseenZeroed = 2,  // both warpgroups have zeroed the unseen rows or keys
  kDqFullWg0 = 3,     // 3, 4: dQ of warpgroup 0, 1 is in shared memory (5, 6 for store warp 1)
  kDqEmptyWg0 = 7,    // 7, 8: dQ of warpgroup 0, 1 has been read (9, 10 for store warp 1)
  kConsumerWg0 = 11,  // barriers 11 and 12 synchronise the threads of one warpgroup each
  kExpWg0 = 13        // 13, 14: warpgroup 0, 1 may compute its exponentials
};
// The 2-CTA kernel has only one dQ store warp, and uses the numbers of the other one.
enum Backward2CtaBarrier : int {
  kPWritten = 5,      // both warpgroups have written P
  kDsReady = 6,       // both warpgroups have written dS, so it may be sent
  kDsConsumedWg0 = 9  // 9, 10: the dQ products of warpgroup 0, 1 no longer read dS
};
inline constexpr int kBackwardConsumerThreads = 256;
inline constexpr int kBackwardConsumerWarps = kBackwardConsumerThreads / 32;
// The number of threads of a consumer warpgroup plus a dQ store warp.
inline constexpr int kBackwardDqThreads = 128 + 32;
// The number of threads of the two consumer warpgroups plus the warp that sends dS.
inline constexpr int kBackwardSendThreads = kBackwardConsumerThreads + 32;

#if TW_HAS_WGMMA
// Returns the state of the K and V pipelines for the work tile at `work_state`. Every work tile
// fills each of these pipelines once, even if it has no query tile.
__device__ __forceinline__ PipelineState<1> backward_sm90_kv_state(
    const PipelineState<kWorkStages>& work_state) {
  static_assert(kWorkStages == 2);
  return {0, static_cast<uint32_t>(work_state.stage)};
}

// At the end, a consumer warpgroup waits until a store warp has read the final dQ of the warpgroup.
__device__ __forceinline__ void backward_sm90_close_dq_buffer(int store_warp, int warpgroup) {
  named_barrier_wait(kDqEmptyWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
}

#endif

}  // namespace torchweld
