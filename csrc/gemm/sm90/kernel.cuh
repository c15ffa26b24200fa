// Computes y = epilogue(a @ b^T) on Hopper's tensor cores. TMA fills shared memory, from which
// wgmma reads both operands.
//
// CTAs are persistent. One lane of the producer warp fills the stages of a pipeline, one k-block
// per stage, and two consumer warpgroups multiply. In cooperative tiles each warpgroup computes
// half of the rows of a tile. In ping-pong tiles the warpgroups compute alternate tiles. One
// warpgroup then runs its epilogue (epilogue.cuh) while the other warpgroup uses the tensor cores.
// The CTAs of a cluster compute tiles in the same columns of y, so they need the same rows of b.
// Each CTA loads a slice of these rows and multicasts the slice to all CTAs of the cluster. The
// tile scheduler visits tiles in bands of rows, so that the running CTAs cover roughly a square of
// y and share operands in L2. Stream-K (tile_scheduler.cuh) may split the last tiles along K.
//
// If y has up to 64 rows, the time is dominated by reads of b. For such products there are swap_ab
// tiles. They compute b @ a^T, so that a CTA holds many rows of b and few rows of a. A cluster may
// split the K of a swap_ab tile.
//
// Source: PTX ISA. The optimisations of the mainloop follow P. Shah, "Outperforming cuBLAS on H100"
// (2024).
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/sm90/registers.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/launch.h"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/named_barriers.h"
#include "gemm/sm90/swap_ab_epilogue.cuh"

namespace torchweld::sm90 {

template <class Config>
struct Shared {
  static constexpr Tile kT = Config::kT;
  // Each stage holds a k-block of a, followed by a k-block of b.
  alignas(kSwizzleAtomBytes) char stages[kT.stages][kT.stage_bytes()];
  alignas(128) char staging[kT.staging_bytes()];
  float bias[Tile::kWarpgroups][kT.block_n];
  PipelineBarriers<kT.stages> pipeline;
};

#if TW_HAS_WGMMA
// Issues the TMA loads of one k-block of both operands into a stage.
template <class Config, class Work>
__device__ __forceinline__ void load_stages(const KernelParams& p, uint32_t s_stage,
                                            uint64_t* s_full, const Work& work, int rank, int k,
                                            int a_term, int b_term) {
  constexpr Tile kT = Config::kT;
  constexpr int kRowElems = Config::kSwizzleRowElems, kCluster = kT.cluster;
  // K may be the concatenation of several segments. Each segment has its own tensor maps.
  const TensorMap *map_a = &p.a, *map_b = &p.b;
  if constexpr (Config::kSegments) {
    int first_k = 0;
#pragma unroll
    for (int i = 0; i < kMaxKSegments - 1; ++i) {
      if (k < p.more_k[i]) continue;
      map_a = &p.more_a[i];
      map_b = &p.more_b[i];
      first_k = p.more_k[i];
    }
    k -= first_k;
  }
  const auto load = [&](uint32_t s_to, const TensorMap& map, int x, int y, int z, int w) {
    tma_load(s_to, map, s_full, x, y, z, w);
  };
  const auto load_shared = [&](uint32_t s_to, const TensorMap& map, int x, int y, int z, int w) {
    if constexpr (kCluster == 1) {
      tma_load(s_to, map, s_full, x, y, z, w);
    } else {
      tma_load_multicast(s_to, map, s_full, x, y, z, w, uint16_t((1 << kCluster) - 1));
    }
  };
  const int a_batch = p.a_batched ? int(work.batch) : 0,
            b_batch = p.b_batched ? int(work.batch) : 0;
  // b may consist of two halves, and its tensor map has a dim for them. In a gated product the
  // halves contain different rows of b; otherwise they contain different columns (K). b_k and
  // b_half are the coordinates of this k-block in the tensor map of b, along K and along the dim of
  // the halves.
  constexpr bool kSwapAb = kT.swap_ab();
  const bool second = !Config::kGated && k >= p.b_k_half;
  const int b_k = second ? k - p.b_k_half : k;
  const auto b_half = [&](int half) {
    return (Config::kGated ? half : int(second)) ^ p.b_reversed;
  };
  // A gated swap_ab tile has kRowsA rows of the left half of b, and the same rows of the right
  // half.
  constexpr int kRowsA = kT.block_m / Config::kHalvesA;
  const int row = int(work.first_row_of(kCluster, rank, kRowsA));
  constexpr bool kSharesA = Work::kClusterOfColumns && kCluster > 1;
  if constexpr (kSharesA) {
    static_assert(Config::kAKMajor && Config::kHalvesA == 1);
    constexpr int kRows = kT.block_m / kCluster;
    load_shared(s_stage + rank * kRows * kKBlockBytes, *map_a, k, row + rank * kRows, 0, a_batch);
  } else if constexpr (Config::kAKMajor) {
#pragma unroll
    for (int half = 0; half < Config::kHalvesA; ++half) {
      load(s_stage + half * kRowsA * kKBlockBytes, *map_a, k, row,
           Config::kHalvesA == 1 ? a_term : b_half(half), a_batch);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kT.block_m / kRowElems; ++i) {
      const int first = i * kRowElems;
      load(s_stage + i * Config::kLeadingBytes, *map_a, row + first % kRowsA, kSwapAb ? b_k : k,
           kSwapAb ? b_half(first / kRowsA) : 0, a_batch);
    }
  }
  constexpr int kHalves = Config::kHalvesB, kColumns = kT.block_n / kHalves;
  const uint32_t s_b = s_stage + kT.block_m * kKBlockBytes;
  const int column = int(work.first_column_of(kCluster, rank, kColumns));
  // The number of CTAs that share b. Each loads every kSharing-th box, for all of them.
  constexpr int kSharing = kSharesA ? 1 : kCluster;
  const int own = kSharesA ? 0 : rank;
  const auto load_b = [&](uint32_t s_to, const TensorMap& map, int x, int y, int z, int w) {
    kSharesA ? load(s_to, map, x, y, z, w) : load_shared(s_to, map, x, y, z, w);
  };
  if constexpr (Config::kBKMajor) {
    constexpr int kBoxes = kHalves > kSharing ? kHalves : kSharing;
    constexpr int kRows = kT.block_n / kBoxes;
#pragma unroll
    for (int i = 0; i < kBoxes / kSharing; ++i) {
      const int box = i * kSharing + own, first = box * kRows;
      load_b(s_b + first * kKBlockBytes, *map_b, k, column + first % kColumns,
             kHalves == 1 ? b_term : b_term * kHalves + b_half(first / kColumns), b_batch);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kT.block_n / kRowElems; ++i) {
      if (kSharing > 1 && i % kSharing != own) continue;
      const int first = i * kRowElems;
      load_b(s_b + i * Config::kLeadingBytes, *map_b, column + first % kColumns, kSwapAb ? k : b_k,
             kSwapAb ? 0 : b_half(first / kColumns), b_batch);
    }
  }
}

// The scheduler of a kernel and the class that describes its work tiles. `Params` is KernelParams
// or a class that derives from it. A derived class may specialise this struct.
template <class Config, class Params>
struct ScheduleOf {
  using Scheduler = TileScheduler<Config::kT.cluster, Config::kT.swap_ab()>;
  using Work = WorkTile;
  // Whether the first tile depends on memory that an earlier kernel writes.
  static constexpr bool kReadsMemory = false;
};
template <class Config, class Params>
using SchedulerOf = typename ScheduleOf<Config, Params>::Scheduler;
template <class Config, class Params>
using WorkOfKernel = typename ScheduleOf<Config, Params>::Work;

// The code of the producer. The scheduler is at its first tile, which `work` describes.
template <class Config, class Params>
__device__ __forceinline__ void produce(const Params& p, Shared<Config>& s, int rank,
                                        SchedulerOf<Config, Params>& scheduler,
                                        WorkOfKernel<Config, Params> work) {
  PipelineState<Config::kT.stages> at;
  while (true) {
    const auto load_k_blocks = [&](int k, int k_blocks, int a_term, int b_term) {
      for (int k_block = 0; k_block < k_blocks; ++k_block, k += Config::kBlockK) {
        uint64_t* s_full = s.pipeline.acquire(at, Config::kT.stage_bytes());
        load_stages<Config>(p, shared_address(s.stages[at.stage]), s_full, work, rank, k, a_term,
                            b_term);
        at.advance();
      }
    };
    if constexpr (Config::kBf16x3) {
      for (int done = 0; done < scheduler.k_blocks; done += kTermKBlocks) {
        const int first = scheduler.first_k_block + done,
                  k_blocks = min(kTermKBlocks, scheduler.k_blocks - done);
        for (int pair = 0; pair < kTermPairs; ++pair) {
          load_k_blocks(first * Config::kBlockK, k_blocks, kTermOfA >> 2 * pair & 3,
                        kTermOfB >> 2 * pair & 3);
        }
      }
    } else {
      load_k_blocks(scheduler.template first_k<Config::kBlockK>(), scheduler.k_blocks, 0, 0);
    }
    if (!scheduler.next()) return;
    work = WorkOfKernel<Config, Params>(p.gemm, p.schedule, scheduler.tile);
  }
}

// Maps the parameter class of a kernel to the class of its epilogue. `Params` is KernelParams or a
// class that derives from it. A derived class may specialise this struct to use an epilogue of its
// own.
template <class Config, class Params>
struct EpilogueOf {
  using Type =
      std::conditional_t<Config::kT.swap_ab(),
                         SwapAbEpilogue<typename Config::Result, Config::kTile, Config::kGated>,
                         BoxEpilogue<typename Config::Result, Config::kTile, Config::kGated>>;
};

// All sums of a thread. If another worker runs the epilogue of the tile, the thread stores them as
// a stream-K partial.
template <class Config, class Sums>
struct ThreadSums : DbiasSums<Config> {
  Sums acc;
};

// Adds up the sums of the CTAs that compute parts of the K of this tile. Returns whether this CTA
// runs the epilogue. If not, the CTA has stored its sums as a partial.
template <class Config, class Scheduler, class Sums, class Epilogue>
__device__ __forceinline__ bool reduce_tile(const KernelParams& p, const Scheduler& scheduler,
                                            ThreadSums<Config, Sums>& all, Epilogue& epilogue,
                                            int rank, int warpgroup) {
  constexpr Tile kT = Config::kT;
  const int thread = threadIdx.x % 128, barrier = kWarpgroupWg0 + warpgroup;
  if constexpr (kT.swap_ab()) {
    if (p.stream_k.split_cluster > 1) {
      const auto reduce = [&](auto split_cluster) {
        if (p.stream_k.split_cluster != split_cluster.value) return;
        epilogue.set_output_slice(cluster_reduce<split_cluster.value, Tile::kConsumerThreads>(
            all.acc[0], p.partials.sums, warpgroup * 128 + thread));
      };
      reduce(std::integral_constant<int, 2>());
      reduce(std::integral_constant<int, 3>());
      reduce(std::integral_constant<int, 4>());
      if constexpr (kT.max_split_cluster() > 4) reduce(std::integral_constant<int, 8>());
      return true;
    }
  }
  // Worker `of` stores its partial for the rows of this warpgroup in a slot of the workspace.
  // Returns the index of that slot.
  const auto slot = [&](uint32_t of) {
    return (int64_t{of} * kT.cluster + rank) * kT.warpgroups_per_tile() +
           (kT.pingpong ? 0 : warpgroup);
  };
  using Flat =
      float[(sizeof(Sums) + (Config::kDbias ? sizeof(DbiasSums<Config>) : 0)) / sizeof(float)];
  Flat& sums = reinterpret_cast<Flat&>(all);
  if (!scheduler.ends()) {
    p.partials.store_partial(sums, slot(scheduler.worker()), thread, barrier);
    return false;
  }
  if (!scheduler.begins()) {
    scheduler.for_each_peer(
        [&](uint32_t peer) { p.partials.accumulate_partial(sums, slot(peer), thread, barrier); });
  }
  return true;
}

// The code of a consumer warpgroup. For each work tile it starts the loads of the epilogue, runs
// the mainloop, adds up the sums of all CTAs that share the tile, and runs the epilogue, which
// stores the results.
template <class Config, class Params>
__device__ __forceinline__ void consume(const Params& p, Shared<Config>& s, int rank,
                                        int warpgroup) {
  using Epilogue = typename EpilogueOf<Config, Params>::Type;
  constexpr Tile kT = Config::kT;
  const int thread = threadIdx.x % 128,
            first_row = kT.pingpong ? 0 : warpgroup * 64 * kT.wgmma_m_tiles();
  const auto release = [&](int stage) {
    if (kT.cluster == 1 && thread == 0) mbarrier_arrive(&s.pipeline.empty[stage]);
    if (kT.cluster > 1 && thread < kT.cluster) mbarrier_arrive_at(&s.pipeline.empty[stage], thread);
  };
  const auto let_other_issue = [&](int other) {
    if (kT.pingpong) named_barrier_arrive(kWarpSchedulerWg0 + other, Tile::kConsumerThreads);
  };
  Epilogue epilogue(p, s.staging, s.bias[warpgroup], warpgroup);
  SchedulerOf<Config, Params> scheduler(p);
  ThreadSums<Config, typename Epilogue::Sums> all;
  Mainloop<Config> mainloop(s.stages[0], first_row);
  if (warpgroup == 1) let_other_issue(0);  // warpgroup 0 issues its first wgmmas first
  for (int phase = 0; scheduler.next(); phase ^= 1) {
    if (kT.pingpong && phase != warpgroup) {
      mainloop.skip(scheduler.k_blocks);
      continue;
    }
    using Work = WorkOfKernel<Config, Params>;
    Work work(p.gemm, p.schedule, scheduler.tile);
    epilogue.fetch(work, rank, scheduler.ends());
    if (kT.pingpong) {
      named_barrier_wait(kWarpSchedulerWg0 + warpgroup, Tile::kConsumerThreads);
    }
    mainloop.run(p, scheduler, all, s, release, [&] { let_other_issue(1 - warpgroup); });
    // NOTE: with many accumulators, registers are scarce during the mainloop. Therefore the work
    // tile is computed again after the mainloop.
    constexpr int kFewAccumulators = 64;
    if (sizeof(all.acc) > kFewAccumulators * sizeof(float)) {
      work = Work(p.gemm, p.schedule, scheduler.tile);
    }
    if (!reduce_tile(p, scheduler, all, epilogue, rank, warpgroup)) continue;
    if constexpr (Config::kDbias) all.store(p.gemm, work, rank, first_row);
    epilogue.finish(all.acc, work, rank, warpgroup);
  }
  epilogue.wait();
}
#endif

template <class Config, class Params = KernelParams>
__global__ void __launch_bounds__(Tile::kThreads, 1) gemm_kernel(const __grid_constant__ Params p) {
#if TW_HAS_WGMMA
  constexpr Tile kT = Config::kT;
  using T = typename Config::T;
  constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  constexpr int kSetupThread = 32;  // a thread of a warp that has no other work
  extern __shared__ __align__(1024) char s_memory[];
  Shared<Config>& s = *reinterpret_cast<Shared<Config>*>(s_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == kSetupThread) {
    prefetch_tensor_map(p.a);
    prefetch_tensor_map(p.b);
    prefetch_tensor_map(p.y);
    // The empty barrier of a stage counts one arrival of every warpgroup that reads the stage, in
    // every CTA of the cluster.
    s.pipeline.init(kT.cluster * (kT.pingpong ? 1 : Tile::kWarpgroups));
    mbarrier_init_fence();
  }
  if constexpr (Config::kDbias) {
    // The kernel computes the sum of each row of a as a product of a and a matrix of ones. Such a
    // kernel has no bias, so the ones are stored in the memory of the bias.
    static_assert(sizeof(s.bias) >= kSameValuesBytes && sizeof(T) == 2);
    const T one = from_float<T>(1.f);
    if (threadIdx.x < kSameValuesBytes / sizeof(T)) reinterpret_cast<T*>(s.bias)[threadIdx.x] = one;
    async_fence();
  }
  // The first work tile depends only on the parameters, so it is computed before the wait for
  // earlier kernels.
  using Schedule = ScheduleOf<Config, Params>;
  typename Schedule::Scheduler scheduler(p);
  if constexpr (Schedule::kReadsMemory) griddep_wait();
  const bool works = scheduler.next();
  const uint32_t first_tile = Schedule::kReadsMemory && !works ? 0 : scheduler.tile;
  const typename Schedule::Work work(p.gemm, p.schedule, first_tile);
  griddep_launch_dependents();
  if constexpr (!Schedule::kReadsMemory) griddep_wait();
  int rank = 0;
  if constexpr (kT.cluster > 1) {
    cluster_arrive();
    cluster_wait();
    rank = int(rank_in_cluster());
  } else {
    __syncthreads();
  }
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && (!Schedule::kReadsMemory || works) && elect_one()) {
      produce(p, s, rank, scheduler, work);
    }
    __syncwarp();
    if (kT.swap_ab() && p.stream_k.split_cluster > 1) {
      cluster_arrive();
      cluster_wait();
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, s, rank, warp / 4 - 1);
    __syncwarp();
  }
  if constexpr (kT.cluster > 1) {
    // Wait for the other CTAs of the cluster. They may still write to the shared memory of this CTA
    // (multicast) or arrive at its barriers.
    cluster_arrive();
    cluster_wait();
  }
#endif
}

template <GemmMath kMath, int kTile>
void launch_tile(const KernelParams& p, cudaStream_t stream) {
  static constexpr Tile kT = kTiles[kTile];
  constexpr bool kSwapAb = kT.swap_ab(), kNeedsKMajor = must_be_k_major(kMath);
  const GemmOperand &a = kSwapAb ? p.gemm.b : p.gemm.a, &b = kSwapAb ? p.gemm.a : p.gemm.b;
  const auto launch = [&](auto gated, auto a_k_major, auto b_k_major, auto dbias) {
    constexpr bool kGated = gated.value, kAKMajor = a_k_major.value, kBKMajor = b_k_major.value;
    if constexpr ((!kNeedsKMajor || (kAKMajor && kBKMajor)) &&
                  kT.unsupported_reason(kSwapAb ? kBKMajor : kAKMajor,
                                        kSwapAb ? kAKMajor : kBKMajor, kGated) == nullptr) {
      constexpr bool kDbias = dbias.value && kT.supports_dbias(kMath, kAKMajor, kBKMajor, kGated);
      using Config = KernelConfig<kMath, kTile, kAKMajor, kBKMajor, kGated, kDbias>;
      static_assert(sizeof(Shared<Config>) <= kT.shared_bytes());
      const int64_t blocks = int64_t{p.stream_k.workers} * kT.cluster;
      Grid grid(blocks, Tile::kThreads, sizeof(Shared<Config>));
      grid.cluster = kSwapAb ? static_cast<int>(p.stream_k.split_cluster) : kT.cluster;
      grid.overlaps = true;
      launch_kernel(gemm_kernel<Config>, grid, stream, p);
    }
  };
  dispatch_bools(launch, p.gemm.epilogue.gated, kNeedsKMajor || a.k_stride == 1,
                 kNeedsKMajor || b.k_stride == 1, p.gemm.dbias_partials != nullptr);
}

}  // namespace torchweld::sm90
