// The gradient of attention on Hopper's tensor cores, in 16 bits: wgmma from shared memory, filled
// by TMA; a block per 128 keys of a kv head, or of a part of its query heads. Above 128 columns:
// attention/sm90/bwd_2cta_kernel.cuh.
//
//   P = exp(scale * Q K^T - lse)     dP = dO V^T      dS = P * (dP - delta), delta = sum(dO * O)
//   dV = P^T dO                      dK = scale * dS^T Q        dQ = scale * dS K
//
// A block walks the live query tiles of its kv head's query heads, or of a part of them, from the
// last to the first, or upwards (AttentionBackwardOrder). One lane of its producer warpgroup loads
// them; two consumer warpgroups have 64 keys each and compute S^T and dP^T, so that P^T and dS^T
// are in registers where the products that sum over the query rows want them. Only dS goes through
// shared memory, for dQ^T = K^T dS^T. The scores of the next tile are multiplied while a warpgroup
// hands its dQ over.
//
// Products whose operands lie in shared memory keep it so busy that a load from there takes 150 to
// 300 cycles, and a fence behind stores as long. Nobody waits for one between two products: where a
// walk is stays in registers, a tile's lse is read before its scores are there, the sums of dP^T
// begin with -delta, and the fence behind dQ comes after the next product has started. Measured on
// an H100: 0.92 of the time of (4, 16, 4096, 128), 0.91 of (1, 16, 8192, 128) without causal.
//
// dQ is summed in fp32 in global memory by bulk additions of whole tiles, in a fixed order: a block
// adds to a query tile after the block of the keys before it, the first one stores. Blocks take
// their work by ticket, tiles of keys ascending, so that a block only waits for blocks that have
// started (attention/sync/bwd_tiles.cuh, and under an AttentionMask attention/sync/bwd_share.cuh).
// Then a kernel scales and rounds dQ, and where a kv head has parts one more adds up their dK and
// dV.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024; the
// fixed order of dQ is ours.
#pragma once

#include "attention/sm90/bwd_consumer.cuh"
#include "attention/sm90/bwd_rows.cuh"
#include "core/launch.h"
#include "device/features.cuh"

namespace torchweld {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_sm90_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<BackwardSm90Shared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.query);
    prefetch_tensor_map(p.key);
    prefetch_tensor_map(p.value);
    prefetch_tensor_map(p.dout);
    s.q_pipeline.init(8);  // a consumer's warps
    s.dout_pipeline.init(8);
    mbarrier_init(&s.k_full, 1);
    mbarrier_init(&s.v_full, 1);
    mbarrier_init_fence();
  }
  if constexpr (Config::kMasked) {
    s.work.template take_masked<Config>(p.args, p.args.g_tickets);
  } else {
    if (threadIdx.x == 0) s.work.template take<Config>(p.args, p.args.g_tickets);
    __syncthreads();
  }
  if (warp < 4) {
    give_up_registers<kProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) backward_sm90_load(p, s);
    } else if (warp <= Config::kAdders) {
      backward_sm90_add<Config>(p, s, warp - 1);
    }
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    BackwardSm90Consumer<Config>(p, s, warp / 4 - 1).run();
  }
#endif
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_tile(const Args& args, cudaStream_t stream) {
  using Config = BackwardSm90Config<T, kTile, Args>;
  constexpr int kKeys = Config::kKeys;
  constexpr int kBytes = sizeof(BackwardSm90Shared<Config>);
  static_assert(kBytes <= Config::kShape.tile_bytes() + kAttentionBackwardSm90ExtraBytes);
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t blocks =
      sizes.batch * sizes.nheads_kv * args.group_parts * divide_up(sizes.seqlen_k, kKeys);
  launch_kernel(attention_backward_sm90_kernel<Config>, {blocks, Config::kThreads, kBytes}, stream,
                backward_sm90_params<Config>(args, kKeys));
  launch_attention_backward_sm90_sums<Config>(args, stream);
}

}  // namespace torchweld
