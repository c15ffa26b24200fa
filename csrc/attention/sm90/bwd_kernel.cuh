// Attention backward on Hopper's tensor cores, in 16 bits, for head dims up to 256:
//
//   P = exp(scale * Q K^T - lse)     dP = dO V^T      dS = P * (dP - delta), delta = sum(dO * O)
//   dV = P^T dO                      dK = scale * dS^T Q        dQ = scale * dS K
//
// The shapes are Q (batch, nheads, seqlen_q, dim), dO (batch, nheads, seqlen_q, dim_v), K (batch,
// nheads_kv, seqlen_k, dim) and V (batch, nheads_kv, seqlen_k, dim_v). For head dims up to 128, or
// up to 192 of Q and K and 128 of V, a CTA processes 128 keys of a KV head, for all or some of the
// query heads of the KV head. It loops over the query tiles whose rows see these keys. Each of two
// consumer warpgroups has 64 of the keys. P^T and dS^T stay in registers for dV and dK. Only dS
// also goes through shared memory, for dQ^T = K^T dS^T.
//
// A CTA is persistent: it draws work tiles by ticket until none is left. The loads of the next work
// tile start early. They run while the consumers process the last query tiles of the current work
// tile and write its dV and dK. With head dims 192/128, dV and dK overwrite V and K in shared
// memory, so the next V and K wait until dV and dK have been read.
//
// While one warpgroup computes exponentials, the other warpgroup keeps the tensor cores busy. For
// this, the warpgroups must be half a step apart. Named barriers let only one warpgroup compute
// exponentials at a time (kExpWg0). Also, dQ of a query tile is computed one step late, so that a
// warpgroup rarely waits for the other warpgroup's dS. For Q of (4, 16, 4096, 64) without causal on
// an H100, the barriers and the late dQ together multiply the time by 0.84. The late dQ without the
// barriers multiplies it by 0.97.
//
// wgmma keeps shared memory busy with reads of operands. Therefore a load from shared memory takes
// 150 to 300 cycles, and a fence after stores takes as long. For head dims above 64, the products
// therefore also subtract lse and delta (StatSliceTile), so that no thread loads them. For smaller
// head dims, a StatSliceTile does not fit in shared memory.
//
// dQ is deterministic: dQ store warps add to it in global memory, in fp32, in the order of the
// keys. CTAs draw tickets in the order of their keys, so a CTA only waits for CTAs that have
// started. The waits cost 1 to 5 % of the time. If every CTA is the last one for a few query tiles,
// its dQ store warps also round these tiles (bwd_dq.cuh). Otherwise, another kernel rounds dQ
// (bwd_postprocess.cuh).
//
// For the largest head dims, a cluster of two CTAs processes the 128 keys, 64 in each CTA
// (bwd_2cta_consumer.cuh). It is not persistent: it processes one work tile.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024. The
// fixed order of dQ is new.
#pragma once

#include <algorithm>

#include "attention/sm90/bwd_2cta_consumer.cuh"
#include "attention/sm90/bwd_consumer.cuh"
#include "attention/sm90/bwd_dq.cuh"
#include "attention/sm90/bwd_postprocess.cuh"
#include "attention/sm90/bwd_producer.cuh"
#include "core/device.h"
#include "core/launch.h"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_sm90_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  constexpr bool k2Cta = Config::kCtas == 2;
  constexpr int kConsumerWarps = kBackwardConsumerWarps;
  using Consumer =
      std::conditional_t<k2Cta, Backward2CtaConsumer<Config>, BackwardSm90Consumer<Config>>;
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.query);
    prefetch_tensor_map(p.key);
    prefetch_tensor_map(p.value);
    prefetch_tensor_map(p.dout);
    s.q_pipeline.init(kConsumerWarps * Config::kCtas);
    s.dout_pipeline.init(kConsumerWarps * Config::kCtas);
    if constexpr (k2Cta) {
      mbarrier_init(&s.k_full, 1);
      mbarrier_init(&s.v_full, 1);
      mbarrier_init(&s.ds_wanted, kConsumerWarps);
      mbarrier_init(&s.ds_full, 1);
      mbarrier_init(&s.ds_sent, 1);
    } else {
      s.ds_pipeline.init(kConsumerWarps, kConsumerWarps);
      // One thread of each warpgroup releases a buffer that dK or dV overwrites, and one lane of
      // each warp releases any other buffer.
      s.k_pipeline.init(Config::kUnequal ? 2 : kConsumerWarps);
      s.v_pipeline.init(2);
      s.work_pipeline.init(kConsumerWarps + Config::kDqStoreWarps);
      for (auto& s_full_of_warp : s.dq_strip_full) {
        for (uint64_t& s_full : s_full_of_warp) mbarrier_init(&s_full, 1);
      }
    }
    mbarrier_init_fence();
  }
  griddep_launch_dependents();
  griddep_wait();
  if constexpr (k2Cta) {
    backward_2cta_get_work(p, s);
  } else {
    __syncthreads();
  }
  if (warp < 4) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    // NOTE: with `<=` in the 2-CTA kernel, ptxas would emit 16 more instructions.
    if (warp == 0) {
      BackwardSm90Producer<Config> producer{p, s};
      if constexpr (k2Cta) {
        producer.run_2cta();
      } else {
        producer.run();
      }
    } else if (k2Cta ? warp == 1 : warp <= Config::kDqStoreWarps) {
      BackwardSm90DqWarp<Config>{p, s, warp - 1}.run();
    } else if constexpr (k2Cta) {
      if (warp == 2) backward_2cta_send_ds(s);
    }
    __syncwarp();
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer{p, s, warp / 4 - 1}.run();
  }
  if constexpr (k2Cta) {
    // The CTAs of a cluster exit together, because each accesses the shared memory of the other.
    cluster_arrive();
    cluster_wait();
  }
#endif
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_tile(const Args& args, cudaStream_t stream) {
  using Config = BackwardSm90Config<T, kTile, Args>;
  constexpr int kCtas = Config::kCtas, kBytes = sizeof(typename Config::Shared);
  static_assert(kBytes <= Config::kShape.tile_bytes() + kAttentionBackwardSm90ExtraBytes);
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t work_tiles =
      sizes.batch * sizes.nheads_kv * args.group_parts * divide_up(sizes.seqlen_k, Config::kKeys);
  const int64_t ctas =
      kCtas == 1 ? std::min<int64_t>(work_tiles, device_facts().sms) : work_tiles * kCtas;
  Grid grid(ctas, Config::kThreads, kBytes);
  grid.cluster = kCtas;
  grid.overlaps = true;
  launch_kernel(attention_backward_sm90_kernel<Config>, grid, stream,
                backward_sm90_params<Config>(args));
  launch_attention_backward_sm90_postprocess<Config>(args, stream);
}

}  // namespace torchweld
