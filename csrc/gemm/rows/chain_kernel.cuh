// Computes y = epilogue(a @ b^T) for up to 16 rows of a, with one chain of additions along K for
// each element of y. The chain has the k16 steps of mma.sync and wgmma in order, so the result has
// the same bits as that of every unsplit tile of the other engines. The batch-invariant mode uses
// this kernel; the kernel of kernel.cuh splits K and is faster if a column of b is long.
//
// Each warp of a block multiplies 8 columns of y by all of K. The warps share a ring of stages,
// which cp.async fills. A stage has four k-blocks, so the block synchronises once per 256 elements
// of K. On an H200, (M, K, N) = (16, 4096, 14336) took 40 us, and 49 us with stages of two.
// The steps of a chain wait for each other, about 20 ns each.
#pragma once

#include "core/launch.h"
#include "device/sm90/dependent_launch.cuh"
#include "gemm/element.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/rows/launch.h"

namespace torchweld {

// Returns the swizzled index of a 16-byte chunk in a shared-memory matrix with kRowChunks chunks
// per row. With this swizzle ldmatrix has no bank conflicts.
template <int kRowChunks>
__device__ __forceinline__ int rows_chunk(int row, int chunk) {
  return row * kRowChunks + (chunk ^ (row / (8 / kRowChunks) & (kRowChunks - 1)));
}

template <typename T_, int kTile, bool kGated_>
struct ChainConfig {
  using T = T_;
  static constexpr RowsTile kT = kRowsTiles[kTile];
  static constexpr bool kGated = kGated_;
  static constexpr int kRows = RowsTile::kRows, kKBlocks = RowsTile::kChainKBlocks;
  static constexpr int kColumns = kT.columns, kStages = kT.stages, kThreads = 32 * kT.warps();
  // kHalves is the number of halves of b. kOwn is the number of columns of y that a block computes.
  static constexpr int kHalves = kGated ? 2 : 1, kOwn = kColumns / kHalves;
  static constexpr int kChunk = 16 / sizeof(T), kBlockK = kKBlockBytes / sizeof(T);

  struct Stage {
    char b[kKBlocks][kColumns * kKBlockBytes];
    char a[kKBlocks][kRows * kKBlockBytes];
  };
  union Shared {
    Stage ring[kStages];
    float sums[kRows][kColumns + 4];  // the padding puts consecutive rows in different banks
  };
};

// Loads the stages of a block. A thread loads one 16-byte chunk of several rows.
template <typename Config>
class ChainLoader {
  using T = typename Config::T;
  static constexpr int kRowStep = Config::kThreads / 8, kBLoads = Config::kColumns / kRowStep;
  static constexpr int kALoads = (Config::kRows + kRowStep - 1) / kRowStep;

 public:
  __device__ __forceinline__ ChainLoader(const GemmParams& p, int64_t column)
      : k_(int(p.k)), row_(int(threadIdx.x) / 8), chunk_(int(threadIdx.x) % 8) {
#pragma unroll
    for (int i = 0; i < kBLoads; ++i) {
      const int row = row_ + i * kRowStep, own = row % Config::kOwn;
      from_b_[i] = static_cast<const T*>(p.b.data) + (column + own) * p.b.row_stride +
                   row / Config::kOwn * p.b.half_stride + chunk_ * Config::kChunk;
      has_b_[i] = column + own < p.n;
    }
#pragma unroll
    for (int i = 0; i < kALoads; ++i) {
      const int row = row_ + i * kRowStep;
      from_a_[i] = static_cast<const T*>(p.a.data) + row * p.a.row_stride + chunk_ * Config::kChunk;
      has_a_[i] = row < p.m;
    }
  }

  // Loads step `step` of K and commits the loads as one cp.async group. The group is empty past the
  // end of K.
  __device__ __forceinline__ void load(int step, typename Config::Stage& s) const {
    const int first = step * Config::kKBlocks * Config::kBlockK;
    if (first < k_) {
#pragma unroll
      for (int block = 0; block < Config::kKBlocks; ++block) {
        const int k = first + block * Config::kBlockK;
        const bool in_k = k + chunk_ * Config::kChunk < k_;
#pragma unroll
        for (int i = 0; i < kBLoads; ++i) {
          copy_async_16_if(shared_address(s.b[block]) + at(i), from_b_[i] + k, has_b_[i] && in_k);
        }
#pragma unroll
        for (int i = 0; i < kALoads; ++i) {
          if (row_ + i * kRowStep >= Config::kRows) continue;
          copy_async_16_if(shared_address(s.a[block]) + at(i), from_a_[i] + k, has_a_[i] && in_k);
        }
      }
    }
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ int at(int i) const {
    return rows_chunk<8>(row_ + i * kRowStep, chunk_) * 16;
  }

  int k_, row_, chunk_;
  const T *from_b_[kBLoads], *from_a_[kALoads];
  bool has_b_[kBLoads], has_a_[kALoads];
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kT.blocks_per_sm) void chain_gemm_kernel(
    const __grid_constant__ GemmParams p) {
  using T = typename Config::T;
  constexpr int kStages = Config::kStages, kOwn = Config::kOwn;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t column = int64_t{blockIdx.x} * kOwn;
  constexpr int kStepK = Config::kKBlocks * Config::kBlockK;
  const int steps = int((p.k + kStepK - 1) / kStepK);
  const ChainLoader<Config> loader(p, column);
  griddep_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) loader.load(i, s.ring[i]);

  float acc[4] = {};
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    loader.load(step + kStages - 1, s.ring[stage == 0 ? kStages - 1 : stage - 1]);
    const auto& in = s.ring[stage];
#pragma unroll
    for (int block = 0; block < Config::kKBlocks; ++block) {
      constexpr int kSlices = Config::kBlockK / 16;
      uint32_t a[kSlices][4], b[kSlices / 2][4];
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        load_matrix_4(a[slice], shared_address(in.a[block]) +
                                    rows_chunk<8>(lane % 16, slice * 2 + lane / 16) * 16);
      }
#pragma unroll
      for (int pair = 0; pair < kSlices / 2; ++pair) {
        load_matrix_4(b[pair], shared_address(in.b[block]) +
                                   rows_chunk<8>(warp * 8 + lane % 8, pair * 4 + lane / 8) * 16);
      }
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        mma_16816<T>(acc, a[slice], b[slice / 2][slice % 2 * 2], b[slice / 2][slice % 2 * 2 + 1]);
      }
    }
    if (++stage == kStages) stage = 0;
  }
  copy_async_wait<0>();
  __syncthreads();  // all warps have read the ring, whose memory now receives the sums
  griddep_launch_dependents();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<float2*>(&s.sums[lane / 4 + half * 8][warp * 8 + lane % 4 * 2]) =
        make_float2(acc[2 * half], acc[2 * half + 1]);
  }
  __syncthreads();
  constexpr int kGroups = kOwn / kGroup;
  const int row = int(threadIdx.x) / kGroups, first = int(threadIdx.x) % kGroups * kGroup;
  if (row >= p.m || column + first >= p.n) return;
  float v[Config::kHalves][kGroup] = {};
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) {
    add_sums(v[half], &s.sums[row][half * kOwn + first]);
  }
  GroupWriter<T>(p, 0, column + first).write(row, 1, 1, v);
}

template <typename T, int kTile, bool kGated>
void launch_chain_kernel(const GemmParams& p, cudaStream_t stream) {
  using Config = ChainConfig<T, kTile, kGated>;
  using Shared = typename Config::Shared;
  static_assert(Config::kRows * Config::kOwn / kGroup <= Config::kThreads);
  static_assert(sizeof(Shared) <= Config::kT.shared_bytes());
  Grid grid((p.n + Config::kOwn - 1) / Config::kOwn, Config::kThreads, int(sizeof(Shared)));
  grid.overlaps = device_facts().clusters;
  launch_kernel(chain_gemm_kernel<Config>, grid, stream, p);
}

}  // namespace torchweld
