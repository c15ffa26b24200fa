// The wide kernels: attention on Hopper's tensor cores, in 16 bits, for head dims above 256 up to
// 512. There are four: the forward, and one kernel for each gradient. All of them compute
//
//   out = f(left right^T, ...) sums
//
// `left` is a tile of rows that stays in shared memory. `right` and `sums` are streams of rows of
// the same length. f converts a tile of scores into a 16-bit operand. In the forward, `left` is Q,
// `right` is K, f is the softmax, and `sums` is V (attention/wide/fwd.cuh, attention/wide/bwd.cuh).
//
// `out` of 64 rows and 512 columns fills 128 registers of each of 256 threads. Therefore a CTA has
// 64 left rows, two warpgroups compute half of the columns of `out` each, and a third warpgroup
// computes the scores. While the third warpgroup computes f, the other two keep the tensor cores
// busy with the operand of the step before. Two producer warps load the streams.
//
// With 64 left rows, each CTA would read the streams faster than the L2 cache can deliver them.
// Therefore two CTAs form a cluster, and each CTA loads half of the streams for both.
// Shared memory is the bottleneck: for 128 right rows of the forward, it is busy for 5200 clocks,
// and the tensor cores for 4096. For 64 right rows of dQ or dK, it is 4400 and 3072 clocks.
#pragma once

#include "attention/wide/consumers.cuh"
#include "core/launch.h"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/sm90/registers.cuh"

namespace torchweld {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_wide_kernel(const __grid_constant__ typename Config::Params p) {
#if TW_HAS_WGMMA
  constexpr int kProducerRegisters = 24, kScoreRegisters = 168, kSumRegisters = 160;
  extern __shared__ __align__(1024) char s_memory[];
  auto& s = *reinterpret_cast<WideShared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.left_full, 1);
    s.score_pipeline.init(4 * Config::kCtas);
    s.sum_pipeline.init(8 * Config::kCtas);
    s.operand_pipeline.init(8, 4);
    for (auto& words : s.unseen) {
      for (uint32_t& word : words) word = 0;
    }
    Config::init(s);
    mbarrier_init_fence();
  }
  griddep_launch_dependents();
  griddep_wait();
  if (warp == 0) Config::find_work(p, s);
  cluster_arrive();
  cluster_wait();
  Config::finish_work(p, s);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) wide_load_scores<Config>(p, s);
    } else if (warp == 1) {
      if (elect_one()) wide_load_sums<Config>(p, s);
    }
    __syncwarp();
  } else if (warp < 8) {
    setmaxnreg_inc<kScoreRegisters>();
    WideScores<Config>(p, s).run();
    __syncwarp();
  } else {
    setmaxnreg_inc<kSumRegisters>();
    WideSums<Config>(p, s, warp / 4 - 2).run();
    __syncwarp();
  }
  // The CTAs of a cluster exit together, because each CTA accesses the shared memory of the others.
  cluster_arrive();
  cluster_wait();
#endif
}

// `splits` is the number of clusters of a work tile.
template <class Config>
void launch_attention_wide_kernel(const typename Config::Params& p, int splits,
                                  cudaStream_t stream) {
  using Tile = AttentionWideTile;
  constexpr int kBytes = sizeof(WideShared<Config>);
  static_assert(kBytes <= Tile::kTileBytes + Tile::kExtraBytes);
  Grid grid(p.schedule.size() * splits * Config::kCtas, Config::kThreads, kBytes);
  grid.cluster = Config::kCtas;
  grid.overlaps = true;
  launch_kernel(attention_wide_kernel<Config>, grid, stream, p);
}

}  // namespace torchweld
