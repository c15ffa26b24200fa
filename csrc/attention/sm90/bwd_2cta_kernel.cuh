// Attention backward on Hopper's tensor cores, in 16 bits, for head dims up to 256 that
// attention/sm90/bwd_kernel.cuh does not support. It runs on clusters of two CTAs. The formulas and
// shapes are in bwd_kernel.cuh.
//
// A cluster processes 128 keys of a KV head, 64 in each CTA. Both CTAs loop over the same query
// tiles and multicast Q and dO to each other.
// dK and dV: each of the two warpgroups of a CTA computes half of the columns. For this, the
// warpgroups exchange P and dS.
// dQ: each CTA computes half of the columns, over the keys of both CTAs. For this, the CTA loads
// these columns of the peer's K and receives the peer's dS. The exchange halves the number of
// additions to dQ in global memory.
//
// A kernel with one CTA per 64 keys took 1.25 to 1.6 times as long. Shared memory is the
// bottleneck: for 64 rows, 64 keys and 256 columns, shared memory is busy for 4000 clocks, and the
// tensor cores for 2560 clocks. A thread uses 128 registers for dK and dV, 32 for S and dP, and 32
// for dQ.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024. The
// exchange between two CTAs is new.
#pragma once

#include "attention/sm90/bwd_2cta_consumer.cuh"
#include "attention/sm90/bwd_dq.cuh"
#include "attention/sm90/bwd_postprocess.cuh"
#include "core/launch.h"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// CTA 0 draws the work tile of the cluster, and CTA 1 copies it.
template <typename Config>
__device__ __forceinline__ void backward_2cta_get_work(const typename Config::Params& p,
                                                       typename Config::Shared& s) {
  if (Config::cta_rank() == 0 && threadIdx.x == 0) {
    s.work.template get_work<Config>(p.args, p.args.g_tickets);
  }
  cluster_arrive();
  cluster_wait();
  constexpr int kPairs = sizeof(s.work) / sizeof(float2);
  static_assert(sizeof(s.work) % sizeof(float2) == 0);
  float2* s_work = reinterpret_cast<float2*>(&s.work);
  if (Config::cta_rank() != 0 && threadIdx.x < kPairs) {
    s_work[threadIdx.x] = load_from_block(s_work + threadIdx.x, 0);
  }
  __syncthreads();
}
#endif

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_2cta_kernel(const __grid_constant__ typename Config::Params p) {
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
    s.q_pipeline.init(kConsumerWarps * Config::kCtas);
    s.dout_pipeline.init(kConsumerWarps * Config::kCtas);
    mbarrier_init(&s.k_full, 1);
    mbarrier_init(&s.v_full, 1);
    mbarrier_init(&s.ds_wanted, kConsumerWarps);
    mbarrier_init(&s.ds_full, 1);
    mbarrier_init(&s.ds_sent, 1);
    mbarrier_init_fence();
  }
  griddep_launch_dependents();
  griddep_wait();
  backward_2cta_get_work<Config>(p, s);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      const bool leads = elect_one();
      if (leads || Config::kMasked) backward_2cta_load<Config>(p, s, leads);
    } else if (warp == 1) {
      backward_sm90_open_dq_buffer(0);
      BackwardSm90DqWarp<Config>{p, s, 0}.process(s.work, 0);
    } else if (warp == 2) {
      backward_2cta_send_ds<Config>(s);
    }
    __syncwarp();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Backward2CtaConsumer<Config>(p, s, warp / 4 - 1).run();
    __syncwarp();
  }
  // The CTAs of a cluster exit together, because each CTA accesses the shared memory of the other.
  cluster_arrive();
  cluster_wait();
#endif
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_2cta_tile(const Args& args, cudaStream_t stream) {
  using Config = Backward2CtaConfig<T, kTile, Args>;
  constexpr int kBytes = sizeof(Backward2CtaShared<Config>);
  static_assert(kBytes <= Config::kShape.tile_bytes() + kAttentionBackwardSm90ExtraBytes);
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t clusters =
      sizes.batch * sizes.nheads_kv * args.group_parts * divide_up(sizes.seqlen_k, Config::kKeys);
  Grid grid(clusters * Config::kCtas, Config::kThreads, kBytes);
  grid.cluster = Config::kCtas;
  grid.overlaps = true;
  launch_kernel(attention_backward_2cta_kernel<Config>, grid, stream,
                backward_sm90_params<Config>(args, Config::kCtaKeys));
  launch_attention_backward_sm90_postprocess<Config>(args, stream);
}

}  // namespace torchweld
