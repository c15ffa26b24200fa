// A block of attention's forward on Hopper: its configuration and shared memory, and what its
// producer warp does, which takes tiles of query rows and loads them.
#pragma once

#include "attention/block.cuh"
#include "attention/sm90/fwd.h"
#include "device/features.cuh"
#include "device/sm90/descriptor.h"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/tma.cuh"

namespace torchweld {

// NOTE: capped scores have kernels of their own. Their code in the way of the others' took those a
// twentieth of their time.
template <typename T_, int kTile, bool kMasked, bool kCapped_>
struct AttentionSm90Config : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr AttentionSm90Tile kShape = kAttentionSm90Tiles[kTile];
  static constexpr int kDim = kShape.dim, kDimV = kShape.dim_v;
  // NOTE: beside the widest sums a mask finds registers with fewer scores.
  static constexpr int kKeys = kMasked && kDimV > 128 ? 64 : kShape.keys;
  static constexpr int kWarpgroups = kShape.warpgroups, kRows = kShape.rows();
  static constexpr int kThreads = kShape.threads(), kStages = kShape.stages;
  static constexpr int kBlocks = kShape.blocks;
  static constexpr int kQueryStages = kShape.query_stages();
  static constexpr int kWarpRows = 16;
  static constexpr int kLines = AttentionSm90Tile::lines(kDim),
                       kLinesV = AttentionSm90Tile::lines(kDimV);
  // Of 64 columns: a warpgroup's query rows, the keys or values of a step.
  static constexpr int kQueryStretch = 64 * kSwizzleRowBytes,
                       kKeyStretch = kKeys * kSwizzleRowBytes;
  static constexpr int kQueryBytes = kLines * kQueryStretch, kKeyBytes = kLines * kKeyStretch,
                       kValueBytes = kLinesV * kKeyStretch;
  // A warpgroup's queries, in whose place its results go out.
  static constexpr int kRowsBytes = std::max(kLines, kLinesV) * kQueryStretch;
  // Wide sums are multiplied only where a maximum has risen by much.
  static constexpr bool kLazy = kDimV > 128;
  static constexpr bool kCapped = kCapped_;
  // Small capped scores need no maximum. Probabilities to 2^(c / 2) are beyond float16; beside the
  // widest sums there are no registers for two ways.
  static constexpr bool kSmallScores = kCapped && std::is_same_v<T, __nv_bfloat16> && kDimV <= 128;
  using Block = AttentionBlockOf<kMasked, kRows, kWarpRows>;
  using Params = AttentionSm90Params<kMasked>;
  static constexpr bool kReadsScores = false;  // as softmax_matmul does
};

template <class Config>
struct AttentionSm90Shared {
  static constexpr int kStages = Config::kStages;
  alignas(
      kSwizzleAtomBytes) char query[Config::kQueryStages][Config::kWarpgroups][Config::kRowsBytes];
  alignas(kSwizzleAtomBytes) char key[kStages][Config::kKeyBytes];
  alignas(kSwizzleAtomBytes) char value[kStages][Config::kValueBytes];
  PipelineBarriers<Config::kQueryStages> queries[Config::kWarpgroups];
  PipelineBarriers<kStages> keys, values;
  PipelineBarriers<2> works;
  typename Config::Block work[2];  // one without rows: there are no more
};

#if TW_HAS_WGMMA
template <class Config>
__device__ __forceinline__ AttentionBlock attention_sm90_block(const AttentionSm90Order& order,
                                                               const AttentionSizes& sizes,
                                                               uint32_t index) {
  const uint32_t section = order.of_section.divide(index);
  const uint32_t in_section = index - section * order.of_section.divisor();
  const uint32_t first_head = section * order.section;
  const FastDivisor& width =
      first_head + order.section <= order.heads ? order.width : order.last_width;
  const uint32_t tile = width.divide(in_section);
  const uint32_t row = first_head + in_section - tile * width.divisor();
  const uint32_t batch = order.nheads.divide(row);
  AttentionBlock block = {};
  block.batch = batch;
  block.head = row - batch * order.nheads.divisor();
  block.first_row = static_cast<int>(order.tiles.divisor() - 1 - tile) * Config::kRows;
  block.rows = min(static_cast<int>(sizes.seqlen_q) - block.first_row, Config::kRows);
  return block;
}

// The results of a tile of which no row sees a key. By the lanes of a warp.
template <class Config>
__device__ __forceinline__ void attention_sm90_write_empty(const typename Config::Params& p,
                                                           const AttentionBlock& block) {
  const AttentionSizes& sizes = p.attention.sizes;
  const int lane = threadIdx.x % 32, dim_v = static_cast<int>(sizes.head_dim_v);
  const int64_t row = (block.batch * sizes.nheads + block.head) * sizes.seqlen_q + block.first_row;
  uint4* const g_out =
      reinterpret_cast<uint4*>(static_cast<typename Config::T*>(p.attention.out) + row * dim_v);
#pragma unroll 1
  for (int i = lane; i < block.rows * dim_v / 8; i += 32) g_out[i] = make_uint4(0, 0, 0, 0);
  if (!p.attention.lse) return;
  float none = -INFINITY;
  if constexpr (Config::kMasked) {
    if (p.attention.mask.sink) none = p.attention.mask.sink[block.head];
  }
  for (int i = lane; i < block.rows; i += 32) p.attention.lse[row + i] = none;
}

// What the producer warp does; one of its lanes issues the copies. Tiles without keys it serves
// itself, while the consumers go on with theirs.
template <class Config>
__device__ __forceinline__ void attention_sm90_produce(const typename Config::Params& p,
                                                       AttentionSm90Shared<Config>& s) {
  constexpr int kKeys = Config::kKeys, kLineElems = AttentionSm90Tile::kLineElems;
  const bool leader = elect_one();
  PipelineState<Config::kStages> at_key, at_value;
  PipelineState<2> at_work;
  PipelineState<Config::kQueryStages> at_query;
  // As many tickets are taken as there are tiles; the last one leaves 0 behind.
  const auto next_ticket = [&] {
    uint32_t taken = 0;
    if (leader) {
      taken = atomicAdd(p.attention.counters, 1u);
      if (taken == p.order.blocks - 1) *p.attention.counters = 0;
    }
    return gridDim.x + __reduce_max_sync(~0u, taken);
  };
  for (uint32_t ticket = blockIdx.x;; ticket = next_ticket()) {
    typename Config::Block& s_block = s.work[at_work.stage];
    const auto wait_for_place = [&] {
      mbarrier_wait(&s.works.empty[at_work.stage], at_work.parity ^ 1);
    };
    AttentionBlock block = {};
    if constexpr (Config::kMasked) wait_for_place();
    if (ticket < p.order.blocks) {
      block = attention_sm90_block<Config>(p.order, p.attention.sizes, ticket);
      if constexpr (Config::kMasked) {
        s_block.find_keys(p.attention, block);
        block = s_block;
      } else {
        block.find_keys(p.attention);
      }
      if (block.keys == 0) {
        attention_sm90_write_empty<Config>(p, block);
        __syncwarp();
        continue;
      }
    }
    const bool more = block.rows > 0;
    if constexpr (!Config::kMasked) wait_for_place();
    if (leader) {
      if constexpr (!Config::kMasked) {
        s_block = block;
      } else if (!more) {
        s_block.rows = 0;
      }
      mbarrier_arrive(&s.works.full[at_work.stage]);
    }
    at_work.advance();
    if (!more) break;
    if (leader) {
      const int batch = static_cast<int>(block.batch), head = static_cast<int>(block.head),
                kv_head = static_cast<int>(p.order.group.divide(head));
      const auto load_keys = [&](int key) {
        uint64_t* s_full = s.keys.acquire(at_key, Config::kKeyBytes);
#pragma unroll
        for (int i = 0; i < Config::kLines; ++i) {
          if constexpr (Config::kReadsScores) {
            tma_load(shared_address(s.key[at_key.stage]) + i * Config::kScoreStretch, p.key, s_full,
                     block.pad + key + i * kLineElems, block.first_row, head, batch);
          } else {
            tma_load(shared_address(s.key[at_key.stage]) + i * Config::kKeyStretch, p.key, s_full,
                     i * kLineElems, block.pad + key, kv_head, batch);
          }
        }
        at_key.advance();
      };
      const auto load_values = [&](int key) {
        uint64_t* s_full = s.values.acquire(at_value, Config::kValueBytes);
#pragma unroll
        for (int i = 0; i < Config::kLinesV; ++i) {
          tma_load(shared_address(s.value[at_value.stage]) + i * Config::kKeyStretch, p.value,
                   s_full, i * kLineElems, block.pad + key, kv_head, batch);
        }
        at_value.advance();
      };
      if constexpr (Config::kReadsScores) {
        load_keys(0);
      } else {
#pragma unroll
        for (int w = 0; w < Config::kWarpgroups; ++w) {
          uint64_t* s_full = s.queries[w].acquire(at_query, Config::kQueryBytes);
#pragma unroll
          for (int i = 0; i < Config::kLines; ++i) {
            tma_load(shared_address(s.query[at_query.stage][w]) + i * Config::kQueryStretch,
                     p.query, s_full, i * kLineElems, block.first_row + w * 64, head, batch);
          }
          if (w == 0) load_keys(0);
        }
        at_query.advance();
      }
      // The consumers make the next step's scores before they multiply this step's values.
      for (int key = kKeys; key < block.keys; key += kKeys) {
        load_keys(key);
        load_values(key - kKeys);
      }
      load_values((block.keys - 1) / kKeys * kKeys);
    }
  }
}
#endif

}  // namespace torchweld
