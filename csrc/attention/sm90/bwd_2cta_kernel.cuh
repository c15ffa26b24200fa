// The gradient of attention on Hopper's tensor cores for head dims of 129 to 256, in 16 bits. It is
// that of attention/sm90/bwd_kernel.cuh but for who does what: a block has 64 keys of a kv head and
// its two consumer warpgroups half of the columns of dK and dV each, for which they exchange P and
// dS.
//
// The two blocks of a cluster have 128 keys, walk the same query tiles and load them for each
// other. Each sums up dQ of half of the columns over the keys of both, for which it has those
// columns of the other's K and is sent its dS. That halves the additions to dQ in global memory.
// Why a pair: a single block per 64 keys took 1.25 to 1.6 times as long, measured.
//
// Of a step of 64 rows and 64 keys the products take 2560 clocks of an SM. Shared memory, 128 bytes
// a clock, is read and written for 1536 clocks by S and dP, 768 by dV and dK, 512 by dQ, 512 by its
// sums, 512 by loads and 200 by P and dS: 4000, or 3100 where K has 192 columns and V 128. Of a
// thread's registers dK and dV have 128, S and dP 32 and dQ 32.
#pragma once

#include "attention/sm90/bwd_2cta_consumer.cuh"
#include "attention/sm90/bwd_rows.cuh"
#include "core/launch.h"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// What the cluster works on: its first block takes that for both.
template <typename Config>
__device__ __forceinline__ void backward_wide_take(const typename Config::Params& p,
                                                   typename Config::Shared& s) {
  if (Config::rank() == 0) {
    if constexpr (Config::kMasked) {
      s.work.template take_masked<Config>(p.args, p.args.g_tickets);
    } else if (threadIdx.x == 0) {
      s.work.template take<Config>(p.args, p.args.g_tickets);
    }
  }
  cluster_arrive();
  cluster_wait();
  constexpr int kPairs = sizeof(s.work) / sizeof(float2);
  static_assert(sizeof(s.work) % sizeof(float2) == 0);
  float2* s_work = reinterpret_cast<float2*>(&s.work);
  if (Config::rank() != 0 && threadIdx.x < kPairs) {
    s_work[threadIdx.x] = load_from_block(s_work + threadIdx.x, 0);
  }
  __syncthreads();
}
#endif

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_bwd_2cta_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  constexpr int kConsumerWarps = 8;
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<Backward2CtaShared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.query);
    prefetch_tensor_map(p.key);
    prefetch_tensor_map(p.value);
    prefetch_tensor_map(p.dout);
    s.q_pipeline.init(kConsumerWarps * Config::kBlocks);
    s.dout_pipeline.init(kConsumerWarps * Config::kBlocks);
    mbarrier_init(&s.k_full, 1);
    mbarrier_init(&s.v_full, 1);
    mbarrier_init(&s.ds_wanted, kConsumerWarps);
    mbarrier_init(&s.ds_full, 1);
    mbarrier_init(&s.ds_sent, 1);
    mbarrier_init_fence();
  }
  backward_wide_take<Config>(p, s);
  if (warp < 4) {
    give_up_registers<kProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) backward_wide_load<Config>(p, s);
    } else if (warp == 1) {
      backward_sm90_add<Config>(p, s, 0);
    } else if (warp == 2) {
      backward_wide_send<Config>(s);
    }
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    Backward2CtaConsumer<Config>(p, s, warp / 4 - 1).run();
    __syncwarp();
  }
  // Nobody leaves while the neighbour may still reach for its shared memory.
  cluster_arrive();
  cluster_wait();
#endif
}

template <typename T, int kTile, typename Args>
void launch_attention_bwd_2cta_tile(const Args& args, cudaStream_t stream) {
  using Config = Backward2CtaConfig<T, kTile, Args>;
  constexpr int kBytes = sizeof(Backward2CtaShared<Config>);
  static_assert(kBytes <= Config::kShape.tile_bytes() + kAttentionBackwardSm90ExtraBytes);
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t clusters =
      sizes.batch * sizes.nheads_kv * args.group_parts * divide_up(sizes.seqlen_k, Config::kKeys);
  Grid grid(clusters * Config::kBlocks, Config::kThreads, kBytes);
  grid.cluster = Config::kBlocks;
  launch_kernel(attention_bwd_2cta_kernel<Config>, grid, stream,
                backward_sm90_params<Config>(args, Config::kBlockKeys));
  launch_attention_backward_sm90_sums<Config>(args, stream);
}

}  // namespace torchweld
