// Attention forward on Hopper: the configuration, the shared memory and the producer warps, which
// schedule work tiles and load Q, K and V.
#pragma once

#include "attention/block.cuh"
#include "attention/sm90/fwd.h"
#include "device/features.cuh"
#include "device/sm90/descriptor.h"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/tma.cuh"

namespace torchweld {

// What a kernel of attention's forward on Hopper does beside the mask. kBias includes kDropout: the
// kernel for a bias also drops probabilities, if the call has dropout.
// NOTE: calls with a soft cap and calls with dropout have separate kernels. When both kinds of
// calls shared a kernel, the code of the cap made calls without a cap 5 % slower.
enum class AttentionSm90Extra { kNone, kCap, kDropout, kBias, kAlibi };

template <typename T_, int kTile, bool kMasked, AttentionSm90Extra kExtra>
struct AttentionSm90Config : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr AttentionSm90Tile kShape = kAttentionSm90Tiles[kTile];
  static constexpr int kDim = kShape.dim, kDimV = kShape.dim_v;
  static constexpr int kKeys = kMasked ? kShape.masked_keys() : kShape.keys;
  static constexpr int kWarpgroups = kShape.warpgroups, kRows = kShape.rows();
  static constexpr int kThreads = kShape.threads(), kStages = kShape.stages;
  static constexpr int kCtasPerSm = kShape.blocks;
  static constexpr bool kCapped = kExtra == AttentionSm90Extra::kCap,
                        kBias = kExtra == AttentionSm90Extra::kBias,
                        kAlibi = kExtra == AttentionSm90Extra::kAlibi,
                        kDropout = kBias || kExtra == AttentionSm90Extra::kDropout;
  static constexpr int kQueryStages = kBias && kDim > 64 ? 1 : kShape.query_stages();
  static constexpr int kWarpRows = 16;
  // A TMA box has 64 columns. Its rows are the 64 query rows of a warpgroup, or the kKeys keys of a
  // tile of K or V.
  static constexpr int kBoxes = AttentionSm90Tile::boxes(kDim),
                       kBoxesV = AttentionSm90Tile::boxes(kDimV);
  static constexpr int kQueryBoxBytes = 64 * kSwizzleRowBytes,
                       kKeyBoxBytes = kKeys * kSwizzleRowBytes;
  static constexpr int kQueryBytes = kBoxes * kQueryBoxBytes, kKeyBytes = kBoxes * kKeyBoxBytes,
                       kValueBytes = kBoxesV * kKeyBoxBytes;
  // The bias of a work tile and of a tile of keys has boxes of kRows rows and 64 keys.
  static constexpr int kBiasBoxBytes = kRows * kSwizzleRowBytes,
                       kBiasBytes = kKeys / 64 * kBiasBoxBytes;
  // The epilogue writes the output of a warpgroup over its query rows in shared memory.
  static constexpr int kQueryOutBytes = std::max(kBoxes, kBoxesV) * kQueryBoxBytes;
  // Whether O is rescaled only after the maximum of a row has risen by a lot (kLazy of
  // online_softmax). Kernels with wide accumulators of O do this.
  static constexpr bool kLazyRescale = kDimV > 128;
  // Whether the kernel has a second code path for small capped scores. Their softmax needs no
  // maximum.
  // NOTE: float16 kernels lack the second path, because its probabilities can reach 2^(0.8 c),
  // which overflows in float16. Kernels for head dims above 128 have no registers for two code
  // paths.
  static constexpr bool kSmallScores =
      kCapped && std::is_same_v<T, __nv_bfloat16> && kDim <= 128 && kDimV <= 128;
  // With dropout, a tile of keys consists of whole squares of DropoutBits.
  using Block =
      std::conditional_t<kDropout, MaskedAttentionBlock<kRows, kWarpRows, DropoutBits::kSquare>,
                         AttentionBlockOf<kMasked, kRows, kWarpRows>>;
  using Params = AttentionSm90Params<kMasked, kBias>;
  // True for softmax_matmul, which loads scores instead of K.
  static constexpr bool kReadsScores = false;
};

// The tiles of the bias in shared memory.
template <class Config, bool kBias = Config::kBias>
struct AttentionSm90BiasTiles {};
template <class Config>
struct AttentionSm90BiasTiles<Config, true> {
  alignas(kSwizzleAtomBytes) char tiles[Config::kStages][Config::kBiasBytes];
};
// Returns the stage of the bias of the tile of keys whose K was the last to pass `key_state`.
__device__ __forceinline__ PipelineState<2> bias_state_of(const PipelineState<2>& key_state) {
  return {key_state.stage ^ 1, key_state.parity ^ static_cast<uint32_t>(key_state.stage ^ 1)};
}

template <class Config>
struct AttentionSm90Shared {
  static constexpr int kStages = Config::kStages, kQueryStages = Config::kQueryStages;
  alignas(kSwizzleAtomBytes) char query[kQueryStages][Config::kWarpgroups][Config::kQueryOutBytes];
  alignas(kSwizzleAtomBytes) char key[kStages][Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char value[kStages][Config::kValueBytes];
  AttentionSm90BiasTiles<Config> bias;
  PipelineBarriers<kQueryStages> query_pipeline[Config::kWarpgroups];
  PipelineBarriers<kStages> key_pipeline, value_pipeline, bias_pipeline;
  PipelineBarriers<2> work_pipeline;
  typename Config::Block work[2];  // the consumers stop at a work tile with rows == 0
  // The producer's work tile, and the first row of its next part, or 0.
  uint32_t ticket;
  int next_row;
  uint64_t may_draw;  // a barrier at which the loader arrives once in each work tile
};

// Whether a producer warp schedules and another one loads. Finding the keys of a work tile under a
// general mask costs as much time as several tiles of keys.
template <class Config>
inline constexpr bool kHasSchedulerWarp = Config::kMasked && Config::kCtasPerSm == 1;

#if TW_HAS_WGMMA
// Finds the query rows of work tile `index`. The caller must then find the keys of the work tile.
template <class Config>
__device__ __forceinline__ AttentionBlock
attention_sm90_block(const AttentionSm90Schedule& schedule, const AttentionSizes& sizes,
                     const AttentionBias& bias, uint32_t index) {
  const AttentionTileOrder::Place place = schedule.order.place(index);
  AttentionBlock block = {};
  block.batch = place.sequence;
  block.head = place.head;
  if (Config::kBias && bias.is_shared()) {
    block.batch = place.head;
    block.head = place.sequence;
  }
  // The last rows come first, because they see the most keys under `causal`.
  block.first_row =
      static_cast<int>(schedule.order.tiles.divisor() - 1 - place.tile) * Config::kRows;
  block.rows = min(static_cast<int>(sizes.seqlen_q) - block.first_row, Config::kRows);
  return block;
}

// Writes `out` and `lse` of a work tile in which no row sees a key. One warp calls this function.
template <class Config>
__device__ __forceinline__ void attention_sm90_store_empty(const typename Config::Params& p,
                                                           const AttentionBlock& block) {
  const AttentionSizes& sizes = p.attention.sizes;
  // NOTE: values computed from fresh_thread() use no registers outside of this function.
  const int lane = fresh_thread() % 32, dim_v = static_cast<int>(sizes.head_dim_v);
  const int64_t row = (block.batch * sizes.nheads + block.head) * sizes.seqlen_q + block.first_row;
  using T = typename Config::T;
  constexpr int kChunks = Config::kDimV / 8, kRowsPerStep = 32 / kChunks;
  const int first = lane / kChunks, column = lane % kChunks * 8;
  const int64_t row_stride = p.attention.out.row_stride;
  T* g_row = p.attention.out.template row<T>(block.batch, block.head, block.first_row + first);
#pragma unroll 1
  for (int i = first; i < block.rows; i += kRowsPerStep, g_row += kRowsPerStep * row_stride) {
    if (column < dim_v) *reinterpret_cast<uint4*>(g_row + column) = make_uint4(0, 0, 0, 0);
  }
  if (!p.attention.lse) return;
  float empty_lse = -INFINITY;
  if constexpr (Config::kMasked) {
    if (p.attention.mask.sink) empty_lse = p.attention.mask.sink[block.head];
  }
  for (int i = lane; i < block.rows; i += 32) p.attention.lse[row + i] = empty_lse;
}

// Draws work tiles by ticket, finds their keys and publishes them. If a work tile has no keys, this
// warp itself writes the results of the work tile, while the consumers compute other work tiles.
template <class Config>
class AttentionSm90Scheduler {
 public:
  PipelineState<2> work_state;
  AttentionBlock block;  // without a general mask: the work tile

  __device__ __forceinline__ AttentionSm90Scheduler(const typename Config::Params& p,
                                                    AttentionSm90Shared<Config>& s)
      : p(p), s(s), leader(elect_one()) {}

  // Publishes the next work tile with keys. If there is none, the function publishes a work tile
  // without rows and returns false. `is_first` tells whether this is the first call.
  __device__ __forceinline__ bool next(bool is_first) {
    if (is_first) {
      ticket = blockIdx.x;
    } else {
      if constexpr (kHasSchedulerWarp<Config>) {
        mbarrier_wait(&s.may_draw, draw_parity);
        draw_parity ^= 1;
      }
      draw();
    }
    while (true) {
      typename Config::Block& s_block = s.work[work_state.stage];
      if constexpr (Config::kMasked) acquire();
      const bool has_work = ticket < p.schedule.blocks;
      if (has_work && find(s_block) == 0) {
        attention_sm90_store_empty<Config>(p, Config::kMasked ? s_block : block);
        __syncwarp();
        draw();
        continue;
      }
      if constexpr (!Config::kMasked) acquire();
      if (leader) {
        if (!has_work) {
          s_block.rows = 0;
        } else if constexpr (!Config::kMasked) {
          s_block = block;
        }
        mbarrier_arrive(&s.work_pipeline.full[work_state.stage]);
      }
      work_state.advance();
      return has_work;
    }
  }

 private:
  static constexpr bool kHasParts =
      Config::kMasked && AttentionSm90Tile::has_parts(Config::kWarpgroups);
  const typename Config::Params& p;
  AttentionSm90Shared<Config>& s;
  const bool leader;
  uint32_t ticket, draw_parity = 0;

  // Finds the rows and the keys of the work tile, and returns the number of keys.
  __device__ __forceinline__ int find(typename Config::Block& s_block) {
    block =
        attention_sm90_block<Config>(p.schedule, p.attention.sizes, p.attention.mask.bias, ticket);
    if constexpr (Config::kMasked) {
      if constexpr (kHasParts) {
        s.ticket = ticket;
        if (s.next_row > 0) {
          block.rows -= s.next_row - block.first_row;
          block.first_row = s.next_row;
        }
      }
      s_block.template find_keys<kHasParts>(p.attention, block);
      if constexpr (kHasParts) {
        s.next_row = s_block.has_next_part() ? s_block.first_row + s_block.rows : 0;
      }
      return s_block.keys;
    } else {
      block.find_keys(p.attention);
      return block.keys;
    }
  }
  __device__ __forceinline__ void acquire() const {
    mbarrier_wait(&s.work_pipeline.empty[work_state.stage], work_state.parity ^ 1);
  }
  // The first work tile of a CTA has the index of the CTA. After each work tile, a CTA draws a
  // ticket for its next work tile, so all CTAs together draw one ticket per work tile. The CTA that
  // draws the last ticket resets the counter for the next call.
  __device__ __forceinline__ void draw() {
    if (kHasParts && s.next_row > 0) {
      ticket = s.ticket;
      return;
    }
    uint32_t drawn = 0;
    if (leader) {
      drawn = atomicAdd(p.attention.counters, 1u);
      if (drawn == p.schedule.blocks - 1) *p.attention.counters = 0;
    }
    ticket = gridDim.x + __reduce_max_sync(~0u, drawn);
  }
};

// Loads Q, K and V of work tiles. One lane calls load().
template <class Config>
struct AttentionSm90Loader {
  static constexpr int kKeys = Config::kKeys, kBoxColumns = AttentionSm90Tile::kBoxColumns;
  const typename Config::Params& p;
  AttentionSm90Shared<Config>& s;
  PipelineState<Config::kStages> key_state, value_state;

  __device__ __forceinline__ AttentionSm90Loader(const typename Config::Params& p,
                                                 AttentionSm90Shared<Config>& s)
      : p(p), s(s) {}

  // Loads a work tile, which is in stage `work_state`.
  __device__ __forceinline__ void load(const AttentionBlock& block,
                                       const PipelineState<2>& work_state) {
    // Every published work tile has query rows.
    constexpr bool kTwo = Config::kQueryStages == 2;
    const PipelineState<Config::kQueryStages> query_state = {
        kTwo ? work_state.stage : 0,
        kTwo ? work_state.parity : static_cast<uint32_t>(work_state.stage)};
    const int batch = static_cast<int>(block.batch), head = static_cast<int>(block.head),
              kv_head = static_cast<int>(p.schedule.group.divide(head));
    // NOTE: the scheduler draws the next ticket two steps before the last one. Much earlier draws
    // would leave work tiles waiting in one CTA while others have none.
    const int draws_from = block.keys - 2 * kKeys;
    const auto load_k = [&](int key) {
      if constexpr (kHasSchedulerWarp<Config>) {
        if (key >= draws_from && (key == 0 || key - kKeys < draws_from)) {
          mbarrier_arrive(&s.may_draw);
        }
      }
      uint64_t* s_full = s.key_pipeline.acquire(key_state, Config::kKeyBytes);
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) {
        if constexpr (Config::kReadsScores) {
          tma_load(shared_address(s.key[key_state.stage]) + i * Config::kScoreBoxBytes, p.key,
                   s_full, block.pad + key + i * kBoxColumns, block.first_row, head, batch);
        } else {
          tma_load(shared_address(s.key[key_state.stage]) + i * Config::kKeyBoxBytes, p.key, s_full,
                   i * kBoxColumns, block.pad + key, kv_head, batch);
        }
      }
      key_state.advance();
    };
    const auto load_bias = [&](int key) {
      if constexpr (Config::kBias) {
        if (p.attention.mask.bias.has_one_row()) return;
        const auto bias_state = bias_state_of(key_state);
        uint64_t* s_full = s.bias_pipeline.acquire(bias_state, Config::kBiasBytes);
#pragma unroll
        for (int i = 0; i < kKeys / kBoxColumns; ++i) {
          tma_load(shared_address(s.bias.tiles[bias_state.stage]) + i * Config::kBiasBoxBytes,
                   p.of_bias.map, s_full, block.pad + key + i * kBoxColumns, block.first_row, head,
                   batch);
        }
      }
    };
    const auto load_v = [&](int key) {
      uint64_t* s_full = s.value_pipeline.acquire(value_state, Config::kValueBytes);
#pragma unroll
      for (int i = 0; i < Config::kBoxesV; ++i) {
        tma_load(shared_address(s.value[value_state.stage]) + i * Config::kKeyBoxBytes, p.value,
                 s_full, i * kBoxColumns, block.pad + key, kv_head, batch);
      }
      value_state.advance();
    };
    if constexpr (Config::kReadsScores) {
      load_k(0);
    } else {
#pragma unroll
      for (int w = 0; w < Config::kWarpgroups; ++w) {
        uint64_t* s_full = s.query_pipeline[w].acquire(query_state, Config::kQueryBytes);
#pragma unroll
        for (int i = 0; i < Config::kBoxes; ++i) {
          tma_load(shared_address(s.query[query_state.stage][w]) + i * Config::kQueryBoxBytes,
                   p.query, s_full, i * kBoxColumns, block.first_row + w * 64, head, batch);
        }
        if (w == 0) load_k(0);
      }
    }
    // Load K of key tile j + 1 before V of key tile j. The consumers need K and V in this order,
    // because they compute S of key tile j + 1 before they compute O += P V of key tile j.
    load_bias(0);
    for (int key = kKeys; key < block.keys; key += kKeys) {
      load_k(key);
      load_v(key - kKeys);
      load_bias(key);
    }
    load_v((block.keys - 1) / kKeys * kKeys);
  }
};

// Runs a producer warp that schedules and loads.
template <class Config>
__device__ __forceinline__ void attention_sm90_produce(const typename Config::Params& p,
                                                       AttentionSm90Shared<Config>& s) {
  AttentionSm90Scheduler<Config> scheduler(p, s);
  AttentionSm90Loader<Config> loader(p, s);
  const bool leader = elect_one();
  for (bool is_first = true;; is_first = false) {
    const PipelineState<2> work_state = scheduler.work_state;
    if (!scheduler.next(is_first)) break;
    if (leader) {
      loader.load(Config::kMasked ? s.work[work_state.stage] : scheduler.block, work_state);
    }
  }
}

// Runs the producer warps of a CTA with kHasSchedulerWarp: one schedules, the other one loads.
template <class Config>
__device__ __forceinline__ void attention_sm90_schedule(const typename Config::Params& p,
                                                        AttentionSm90Shared<Config>& s) {
  AttentionSm90Scheduler<Config> scheduler(p, s);
  for (bool is_first = true; scheduler.next(is_first);) is_first = false;
}
template <class Config>
__device__ __forceinline__ void attention_sm90_load(const typename Config::Params& p,
                                                    AttentionSm90Shared<Config>& s) {
  if (!elect_one()) return;
  AttentionSm90Loader<Config> loader(p, s);
  for (PipelineState<2> work_state;; work_state.advance()) {
    s.work_pipeline.wait(work_state);
    // NOTE: the loads read the block from shared memory, because few registers are free.
    const AttentionBlock& block = s.work[work_state.stage];
    if (block.rows == 0) break;
    loader.load(block, work_state);
    mbarrier_arrive(&s.work_pipeline.empty[work_state.stage]);
  }
}
#endif

}  // namespace torchweld
