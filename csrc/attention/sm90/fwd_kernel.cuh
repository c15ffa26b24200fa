// attention's forward on Hopper's tensor cores, in 16 bits: wgmma from shared memory, filled by
// TMA.
//
// A block stays for many tiles of query rows, which it takes by ticket. Its producer warp finds the
// tile's keys, tells the consumers, and fills the pipelines of keys and of values; the walk over
// the keys starts at the first one that is not padding, so that only the last steps need a mask.
// Each consumer warpgroup has 64 rows of the tile: scores in registers, probabilities against a
// running maximum, which stay in registers as the first operand of P V. While a step's values are
// multiplied, the scores of the next step become probabilities. The warpgroups take turns at the
// tensor cores (ping-pong), so that one's exponentials run under the other's products.
// A warpgroup lets the steps pass of which its rows see no key.
// Short rows spend most of their time on what begins and ends a tile. There a block has one
// warpgroup and shares the SM with others, which are busy meanwhile.
// Tiles are in the order of AttentionSchedule: the longest rows first, the heads that share the L2
// cache together. What is not there (rows, keys, head dims) arrives as zeros.
// Source: Shah et al., "FlashAttention-3", 2024.
#pragma once

#include "attention/sm90/fwd_consumer.cuh"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    attention_sm90_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<AttentionSm90Shared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.query);
    prefetch_tensor_map(p.key);
    prefetch_tensor_map(p.value);
    constexpr int kWarps = Config::kWarpgroups * 4;  // of the consumers
    for (auto& queries : s.queries) queries.init(4);
    s.keys.init(kWarps);
    s.values.init(kWarps);
    s.works.init(kWarps);
    mbarrier_init_fence();
  }
  griddep_launch_dependents();
  griddep_wait();
  __syncthreads();
  if constexpr (Config::kBlocks == 1) {
    // What the warpgroups give up and take adds up to what they start with.
    constexpr int kProducerRegisters = Config::kWarpgroups == 3 ? 32 : 40,
                  kConsumerRegisters = Config::kWarpgroups == 3 ? 160 : 232;
    if (warp < 4) {
      give_up_registers<kProducerRegisters>();
      if (warp == 0) attention_sm90_produce(p, s);
    } else {
      take_registers<kConsumerRegisters>();
      AttentionSm90Consumer<Config>(p, s, warp / 4 - 1).run();
    }
  } else if (warp == Config::kWarpgroups * 4) {
    attention_sm90_produce(p, s);
  } else {
    AttentionSm90Consumer<Config>(p, s, warp / 4).run();
  }
#endif
}

template <class Config>
void launch_attention_sm90_kernel(const typename Config::Params& p, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(p.order.blocks, device_facts().sms * Config::kBlocks);
  Grid grid(blocks, Config::kThreads, sizeof(AttentionSm90Shared<Config>));
  grid.overlaps = true;
  launch_kernel(attention_sm90_kernel<Config>, grid, stream, p);
}

template <typename T, int kTile, bool kMasked, bool kCapped = false>
void launch_attention_sm90_of(const typename AttentionVariant<kMasked>::Params& a,
                              cudaStream_t stream) {
  using Config = AttentionSm90Config<T, kTile, kMasked, kCapped>;
  static_assert(sizeof(AttentionSm90Shared<Config>) <=
                Config::kShape.tile_bytes() + AttentionSm90Tile::kExtraBytes);
  const AttentionSizes& sizes = a.sizes;
  const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                       int box_rows) {
    return attention_tensor_map("attention", a.dtype, t, sizes.batch, heads, rows, columns,
                                box_rows);
  };
  const typename Config::Params p = {
      map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, 64),
      map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, Config::kKeys),
      map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, Config::kKeys),
      a,
      Config::scale(a),
      AttentionSm90Order(a, Config::kRows)};
  launch_attention_sm90_kernel<Config>(p, stream);
}

template <typename T, int kTile>
void launch_attention_sm90_tile(const AttentionParams& params, cudaStream_t stream) {
  launch_attention_sm90_of<T, kTile, false>(params, stream);
}
template <typename T, int kTile>
void launch_attention_sm90_tile(const MaskedAttentionParams& params, cudaStream_t stream) {
  if (params.mask.softcap > 0.f) {
    return launch_attention_sm90_of<T, kTile, true, true>(params, stream);
  }
  launch_attention_sm90_of<T, kTile, true>(params, stream);
}

}  // namespace torchweld
