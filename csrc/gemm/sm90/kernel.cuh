// y = epilogue(a @ b^T) on Hopper's tensor cores: wgmma from shared memory, filled by TMA.
//
// A block stays for many work tiles. One lane of its producer warp walks them and fills the stages
// of a pipeline, a step of K each; two consumer warpgroups multiply. Cooperative tiles have half of
// their rows in each warpgroup. In ping-pong the warpgroups take the tiles by turns, so that one
// finishes its tile (epilogue.cuh) while the tensor cores work for the other. The blocks of a
// cluster have tiles below each other: each loads its part of b's rows for all of them (multicast).
// Tiles are walked in bands of kBandRows rows, so that the blocks in flight cover a square of y and
// share operands in L2.
//
// Source: PTX ISA; the steps from a plain wgmma loop to this one follow P. Shah, "Outperforming
// cuBLAS on H100" (2024).
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/registers.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/launch.h"

namespace torchweld {

template <typename T_, int kTile_, bool kAKMajor_, bool kBKMajor_, bool kGated_>
struct Sm90Config {
  using T = T_;
  static constexpr int kTile = kTile_;
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr Sm90Tile kT = kSm90Tiles[kTile];
  static constexpr int kStepElems = kGemmStepBytes / int(sizeof(T));
  // A line of an MN-major tile has this much of M or N; such stretches follow one another.
  static constexpr int kLineElems = kStepElems, kStretchBytes = kStepElems * kSwizzleLineBytes;
};

template <class Config>
struct Sm90Shared {
  static constexpr Sm90Tile kT = Config::kT;
  alignas(kSwizzleAtomBytes) char stages[kT.stages][kT.stage_bytes()];  // a, then b
  alignas(128) char boxes[8][kT.boxes * kT.box_bytes(sizeof(typename Config::T))];
  float bias[Sm90Tile::kWarpgroups][kT.block_n];
  PipelineBarriers<kT.stages> pipeline;
};

#if TW_HAS_WGMMA
// Steps of K of a work tile.
template <class Config>
__device__ __forceinline__ int sm90_steps(const GemmParams& p, int split) {
  const int64_t begin = split * p.choice.k_split;
  const int64_t elems = min(p.choice.k_split, p.k - begin);
  return int((elems + Config::kStepElems - 1) / Config::kStepElems);
}

// The producer's loads of a step.
template <class Config>
__device__ __forceinline__ void sm90_load(const Sm90Params& p, uint32_t s_stage, uint64_t* s_full,
                                          const WorkTile& work, int rank, int k) {
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kLine = Config::kLineElems, kCluster = kT.cluster;
  const auto load = [&](uint32_t s_to, const TensorMap& map, int x, int y, int z, int w) {
    tma_load(s_to, map, s_full, x, y, z, w);
  };
  const auto load_shared = [&](uint32_t s_to, const TensorMap& map, int x, int y, int z, int w) {
    if constexpr (kCluster == 1) {
      tma_load(s_to, map, s_full, x, y, z, w);
    } else {
      tma_load_to_all(s_to, map, s_full, x, y, z, w, uint16_t((1 << kCluster) - 1));
    }
  };
  const int a_batch = p.a_batched ? int(work.batch) : 0,
            b_batch = p.b_batched ? int(work.batch) : 0;
  const int row = (int(work.tile_m) * kCluster + rank) * kT.block_m;
  if constexpr (Config::kAKMajor) {
    load(s_stage, p.a, k, row, 0, a_batch);
  } else {
#pragma unroll
    for (int i = 0; i < kT.block_m / kLine; ++i) {
      load(s_stage + i * Config::kStretchBytes, p.a, row + i * kLine, k, 0, a_batch);
    }
  }
  // Both halves of a gated tile end at the same column of y.
  constexpr int kHalves = Config::kGated ? 2 : 1, kColumns = kT.block_n / kHalves;
  const uint32_t s_b = s_stage + kT.block_m * kGemmStepBytes;
  const int column = int(work.tile_n) * kColumns;
  if constexpr (Config::kBKMajor) {
    constexpr int kBoxes = kHalves > kCluster ? kHalves : kCluster;
    constexpr int kRows = kT.block_n / kBoxes;
#pragma unroll
    for (int i = 0; i < kBoxes / kCluster; ++i) {
      const int box = i * kCluster + rank, first = box * kRows;
      load_shared(s_b + first * kGemmStepBytes, p.b, k, column + first % kColumns, first / kColumns,
                  b_batch);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kT.block_n / kLine; ++i) {
      if (kCluster > 1 && i % kCluster != rank) continue;
      const int first = i * kLine;
      load_shared(s_b + i * Config::kStretchBytes, p.b, column + first % kColumns, k,
                  first / kColumns, b_batch);
    }
  }
}

template <class Config>
__device__ __forceinline__ void sm90_produce(const Sm90Params& p, Sm90Shared<Config>& s, int rank,
                                             uint32_t first, uint32_t stride) {
  PipelineState<Config::kT.stages> at;
  for (uint32_t item = first; item < p.schedule.items; item += stride) {
    const WorkTile work(p.schedule, item);
    const int steps = sm90_steps<Config>(p.gemm, work.split);
    int k = int(work.split * p.gemm.choice.k_split);
    for (int step = 0; step < steps; ++step, k += Config::kStepElems) {
      uint64_t* s_full = s.pipeline.acquire(at, Config::kT.stage_bytes());
      sm90_load<Config>(p, shared_address(s.stages[at.stage]), s_full, work, rank, k);
      at.advance();
    }
  }
}

// acc = a @ b^T of a warpgroup's part of a work tile. s_a and s_b: where its part lies in stage 0.
// Calls `issued` once the last product is on its way.
template <class Config, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_mainloop(Sums& acc,
                                              PipelineBarriers<Config::kT.stages>& pipeline,
                                              PipelineState<Config::kT.stages>& at, uint32_t s_a,
                                              uint32_t s_b, int steps, const Release& release,
                                              const Issued& issued) {
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kSlices = 4,
                kPieceBytes = Config::kAKMajor ? 64 * kGemmStepBytes : Config::kStretchBytes;
  // From one slice of K to the next.
  constexpr uint32_t kNextA = Config::kAKMajor ? 32 : 16 * kSwizzleLineBytes;
  constexpr uint32_t kNextB = Config::kBKMajor ? 32 : 16 * kSwizzleLineBytes;
  const auto descriptor = [](bool k_major, uint32_t s_at) {
    return k_major ? k_major_descriptor(s_at) : mn_major_descriptor(s_at, Config::kStretchBytes);
  };
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    pipeline.wait(at);
    const uint32_t stage = at.stage * kT.stage_bytes();
    const uint64_t a = descriptor(Config::kAKMajor, s_a + stage);
    const uint64_t b = descriptor(Config::kBKMajor, s_b + stage);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kT.row_pieces(); ++i) {
        Wgmma<typename Config::T, kT.block_n>::template multiply<!Config::kAKMajor,
                                                                 !Config::kBKMajor>(
            acc[i], a + ((slice * kNextA + i * kPieceBytes) >> 4), b + (slice * kNextB >> 4),
            step > 0 || slice > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(before);  // the products of the step before have read it
    before = at.stage;
    at.advance();
  }
  issued();
  wgmma_wait<0>();
  release(before);
}

// What a consumer warpgroup does. Named barriers: 1 and 2 are the warpgroups' own, 3 and 4 their
// turns at the tensor cores.
template <class Config>
__device__ __forceinline__ void sm90_consume(const Sm90Params& p, Sm90Shared<Config>& s, int rank,
                                             uint32_t first, uint32_t stride, int warpgroup) {
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kOwn = 1, kTurn = 3, kBoth = 256;
  constexpr int kRows = 64 * kT.row_pieces();  // of a warpgroup
  using Epilogue = Sm90Epilogue<typename Config::T, Config::kTile, Config::kGated>;
  const int thread = threadIdx.x % 128;
  const GemmParams& g = p.gemm;
  const bool biased = g.epilogue.bias != nullptr && g.choice.splits == 1;
  const auto release = [&](int stage) {
    if constexpr (Config::kT.cluster == 1) {
      if (thread == 0) mbarrier_arrive(&s.pipeline.empty[stage]);
    } else {
      if (thread < Config::kT.cluster) mbarrier_arrive_at(&s.pipeline.empty[stage], thread);
    }
  };
  const int first_row = kT.pingpong ? 0 : warpgroup * kRows;
  const uint32_t s_a = shared_address(s.stages[0]) +
                       (Config::kAKMajor ? first_row * kGemmStepBytes
                                         : first_row / Config::kLineElems * Config::kStretchBytes);
  const uint32_t s_b = shared_address(s.stages[0]) + kT.block_m * kGemmStepBytes;
  const int warp = warpgroup * 4 + thread / 32;
  Epilogue epilogue(p, shared_address(s.boxes[warp]), s.bias[warpgroup]);
  PipelineState<kT.stages> at;
  uint32_t item = first;
  const auto pass_over = [&] {  // the other warpgroup's tile
    if (kT.pingpong && item < p.schedule.items) {
      at.advance(sm90_steps<Config>(g, WorkTile(p.schedule, item).split));
    }
    if (kT.pingpong) item += stride;
  };
  if (kT.pingpong && warpgroup == 1) {
    pass_over();
    named_barrier_arrive(kTurn, kBoth);  // the first turn is the other one's
  }
  typename Epilogue::Sums acc;
  while (item < p.schedule.items) {
    const WorkTile work(p.schedule, item);
    const int column = int(work.tile_n) * (Config::kGated ? kT.block_n / 2 : kT.block_n);
    if (biased) {
      named_barrier_wait(kOwn + warpgroup, 128);  // the last tile's has been read
      Epilogue::load_bias(g, s.bias[warpgroup], column, thread);
      named_barrier_wait(kOwn + warpgroup, 128);
    }
    if (kT.pingpong) named_barrier_wait(kTurn + warpgroup, kBoth);
    sm90_mainloop<Config>(acc, s.pipeline, at, s_a, s_b, sm90_steps<Config>(g, work.split), release,
                          [&] {
                            if (kT.pingpong) named_barrier_arrive(kTurn + 1 - warpgroup, kBoth);
                          });
    const int row =
        (int(work.tile_m) * kT.cluster + rank) * kT.block_m + first_row + thread / 32 * 16;
    if (g.choice.splits > 1) {
      epilogue.store_part(acc, row, column, int(work.batch), work.split);
    } else {
      epilogue.finish(acc, row, column, int(work.batch));
    }
    item += stride;
    pass_over();
  }
  epilogue.wait();
}
#endif

template <class Config>
__global__ void __launch_bounds__(Sm90Tile::kThreads, 1)
    sm90_gemm_kernel(const __grid_constant__ Sm90Params p) {
#if TW_HAS_WGMMA
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  extern __shared__ __align__(1024) char s_memory[];
  Sm90Shared<Config>& s = *reinterpret_cast<Sm90Shared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.a);
    prefetch_tensor_map(p.b);
    prefetch_tensor_map(p.y);
    // Every warpgroup that reads a stage gives it back, in every block that it was sent to.
    s.pipeline.init(kT.cluster * (kT.pingpong ? 1 : Sm90Tile::kWarpgroups));
    mbarrier_init_fence();
  }
  uint32_t first = blockIdx.x, stride = gridDim.x;
  int rank = 0;
  if constexpr (kT.cluster > 1) {
    cluster_arrive();
    cluster_wait();
    rank = int(rank_in_cluster());
    first /= kT.cluster;
    stride /= kT.cluster;
  } else {
    __syncthreads();
  }
  if (warp < 4) {
    give_up_registers<kProducerRegisters>();
    if (warp == 0 && elect_one()) sm90_produce(p, s, rank, first, stride);
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    sm90_consume(p, s, rank, first, stride, warp / 4 - 1);
    __syncwarp();
  }
  if constexpr (kT.cluster > 1) {
    // A neighbour may still send to this block, or arrive at its barriers.
    cluster_arrive();
    cluster_wait();
  }
#endif
}

template <typename T, int kTile, bool kGated, bool kAKMajor, bool kBKMajor>
void launch_sm90_kernel(const Sm90Params& p, cudaStream_t stream) {
  constexpr Sm90Tile kT = kSm90Tiles[kTile];
  if constexpr (kT.lacks(sizeof(T), kAKMajor, kBKMajor, kGated) == nullptr) {
    using Config = Sm90Config<T, kTile, kAKMajor, kBKMajor, kGated>;
    static_assert(sizeof(Sm90Shared<Config>) <= kT.shared_bytes(sizeof(T)));
    const int64_t clusters =
        std::min(int64_t{p.schedule.items}, int64_t{device_facts().most_clusters(kT.cluster)});
    Grid grid(clusters * kT.cluster, Sm90Tile::kThreads, sizeof(Sm90Shared<Config>));
    grid.cluster = kT.cluster;
    launch_kernel(sm90_gemm_kernel<Config>, grid, stream, p);
  }
}

template <typename T, int kTile, bool kGated>
void launch_sm90_layout(const Sm90Params& p, cudaStream_t stream) {
  const bool a_k_major = p.gemm.a.k_stride == 1, b_k_major = p.gemm.b.k_stride == 1;
  if (a_k_major && b_k_major) return launch_sm90_kernel<T, kTile, kGated, true, true>(p, stream);
  if (a_k_major) return launch_sm90_kernel<T, kTile, kGated, true, false>(p, stream);
  if (b_k_major) return launch_sm90_kernel<T, kTile, kGated, false, true>(p, stream);
  launch_sm90_kernel<T, kTile, kGated, false, false>(p, stream);
}

template <typename T, int kTile>
void launch_sm90_tile(const Sm90Params& p, cudaStream_t stream) {
  if (p.gemm.epilogue.gated) return launch_sm90_layout<T, kTile, true>(p, stream);
  launch_sm90_layout<T, kTile, false>(p, stream);
}

}  // namespace torchweld
