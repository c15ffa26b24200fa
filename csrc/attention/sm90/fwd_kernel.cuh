// Attention forward on Hopper's tensor cores, in 16 bits:
//
//   out = softmax(scale * Q K^T + mask) V        lse = log(sum(exp(scale * Q K^T + mask)))
//
// The shapes are Q (batch, nheads, seqlen_q, head_dim), K (batch, nheads_kv, seqlen_k, head_dim)
// and V (batch, nheads_kv, seqlen_k, head_dim_v). A persistent CTA draws work tiles by ticket. A
// work tile is kRows query rows of one head. The CTA's producer warp loads Q, K and V by TMA. TMA
// writes zeros for rows and columns that don't exist. Each consumer warpgroup has 64 of the query
// rows. S, P and O stay in registers.
//
// Under a general mask, another warp (kHasSchedulerWarp) finds the keys of the next work tile while
// the producer warp loads. A consumer warpgroup knows the range of keys that all of its rows see.
// Between two products it then waits for no loads that decide about masks and zeros. Both together
// made (8, 16, 2048, 64) with a mask 11 % faster, (32, 12, 512, 64) 14 %, and packed documents of
// 512 tokens in head dim 128 3 % slower.
//
// Two overlaps hide the time of the exponentials. The softmax of a tile of keys runs during P V of
// the previous tile of keys. The warpgroups issue wgmma in ping-pong order.
//
// The longest work tiles come first. Heads run together if their keys fit in the L2 cache
// (AttentionSchedule). The loop over the keys starts behind the padding, so only the last tiles of
// keys need a mask. Short sequences spend most of their time at the start and the end of work
// tiles. Therefore their CTAs have one consumer warpgroup each, and several CTAs share an SM.
//
// A bias is added to S before the mask. The producer copies its tiles in a pipeline of their own: a
// stage of the bias is free only after the softmax, and K must not wait for that. If all sequences
// share the bias, the work tiles of one head in all sequences are neighbours, so that the bias is
// read from the L2 cache.
//
// ALiBi costs one FMA a score if the keys of a tile lie on one side of the rows' positions: slope *
// (key - first key of the thread) is added to S, and what is constant in a row and a tile is added
// to the maximum of the row.
// Source: Shah et al., "FlashAttention-3", 2024.
#pragma once

#include "attention/sm90/fwd_consumer.cuh"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_sm90_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<AttentionSm90Shared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.query);
    prefetch_tensor_map(p.key);
    prefetch_tensor_map(p.value);
    constexpr int kConsumerWarps = Config::kWarpgroups * 4;
    for (auto& pipeline : s.query_pipeline) pipeline.init(4);
    s.key_pipeline.init(kConsumerWarps);
    s.value_pipeline.init(kConsumerWarps);
    s.bias_pipeline.init(kConsumerWarps);
    s.work_pipeline.init(kConsumerWarps + (kHasSchedulerWarp<Config> ? 1 : 0));
    s.next_row = 0;
    mbarrier_init(&s.may_draw, 1);
    mbarrier_init_fence();
  }
  griddep_launch_dependents();
  griddep_wait();
  __syncthreads();
  if constexpr (Config::kCtasPerSm == 1) {
    // NOTE: the registers of all warpgroups must add up to the number of registers that the CTA has
    // at launch. The launch bounds determine this number.
    constexpr int kProducerRegisters = Config::kWarpgroups == 3 ? 32 : 40,
                  kConsumerRegisters = Config::kWarpgroups == 3 ? 160 : 232;
    if (warp < 4) {
      setmaxnreg_dec<kProducerRegisters>();
      if constexpr (kHasSchedulerWarp<Config>) {
        if (warp == 0) attention_sm90_load(p, s);
        if (warp == 1) attention_sm90_schedule(p, s);
      } else {
        if (warp == 0) attention_sm90_produce(p, s);
      }
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
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
  const int64_t ctas =
      std::min<int64_t>(p.schedule.blocks, device_facts().sms * Config::kCtasPerSm);
  Grid grid(ctas, Config::kThreads, sizeof(AttentionSm90Shared<Config>));
  grid.overlaps = true;
  launch_kernel(attention_sm90_kernel<Config>, grid, stream, p);
}

template <typename T, int kTile, bool kMasked>
void launch_attention_sm90_tile(const AttentionParams& a, cudaStream_t stream) {
  using Extra = AttentionSm90Extra;
  using std::integral_constant;
  const auto launch = [&](auto extra) {
    using Config = AttentionSm90Config<T, kTile, kMasked, extra.value>;
    constexpr int kBytes = sizeof(AttentionSm90Shared<Config>);
    static_assert(kBytes <= (Config::kBias
                                 ? AttentionSm90Tile::kSmBytes - AttentionSm90Tile::kBlockBytes
                                 : Config::kShape.tile_bytes() +
                                       AttentionSm90Tile::extra_bytes(Config::kRows)));
    const AttentionSizes& sizes = a.sizes;
    const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                         int box_rows) {
      return attention_tensor_map("attention", a.dtype, t, sizes.batch, heads, rows, columns,
                                  box_rows);
    };
    typename Config::Params p = {
        map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, 64),
        map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, Config::kKeys),
        map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, Config::kKeys),
        a,
        Config::scale(a),
        AttentionSm90Schedule(a, Config::kRows)};
    if constexpr (Config::kBias) {
      const AttentionBias& bias = a.mask.bias;
      p.of_bias.map = map({bias.data, bias.batch_stride, bias.head_stride, bias.row_stride},
                          sizes.nheads, sizes.seqlen_q, sizes.seqlen_k, Config::kRows);
    }
    // Whether the scores of a warp are small depends on all of its rows.
    if (a.key_grid > 1) p.small.enabled = false;
    launch_attention_sm90_kernel<Config>(p, stream);
  };
  if constexpr (kMasked) {
    constexpr AttentionSm90Tile kShape = kAttentionSm90Tiles[kTile];
    if constexpr (kShape.supports_bias()) {
      if (a.mask.bias.given()) return launch(integral_constant<Extra, Extra::kBias>());
    }
    if constexpr (kShape.supports_dropout()) {
      if (a.mask.dropout.given()) return launch(integral_constant<Extra, Extra::kDropout>());
    }
    if constexpr (kShape.supports_alibi()) {
      if (a.mask.alibi) return launch(integral_constant<Extra, Extra::kAlibi>());
    }
    if (a.mask.softcap > 0.f) return launch(integral_constant<Extra, Extra::kCap>());
  }
  launch(integral_constant<Extra, Extra::kNone>());
}

}  // namespace torchweld
