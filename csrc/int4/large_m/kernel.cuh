// Computes y = x @ W^T + bias for a repacked 4-bit weight W and many rows of x, with wgmma.
// mma.sync reaches only half of wgmma's rate, measured with int4 (4096, 4096, 4096) bfloat16.
//
// A block computes a tile of y (rows of W by tokens) for a split of K. cp.async fills a ring of
// stages in shared memory. The weight is the register operand of wgmma: each warp unpacks a slice
// of 16 columns of its own rows while the tensor cores multiply the previous slice by x in shared
// memory. The accumulators hold y^T, and stmatrix transposes them. The splits of a tile form a
// cluster. The blocks of the cluster add up their partials through distributed shared memory, in a
// fixed order.
//
// Rounding: code - zero is exact. Each weight is rounded once, to the dtype of x.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/wgmma.cuh"
#include "int4/fragments.cuh"
#include "int4/large_m/finish.cuh"

namespace torchweld {

// The weight in a warp's registers: the words of a chunk, and the fragments of two slices.
template <typename T, int kTile>
struct Int4LargeMWarp {
  using Shape = Int4LargeMShape<kTile>;
  using Loader = Int4LargeMLoader<T, kTile>;
  using Sums = typename Shape::Sums;
  static constexpr Int4LargeMTile kT = Shape::kT;
  static constexpr int kN = Shape::kN, kM = Shape::kM, kWgmmaN = Shape::kWgmmaN;

  uint32_t a[2][kN][4];
  uint4 words[kN];
  Int4CodeScales<T> scales[kN];
  Int4Zeros<T> zeros[kN];

  // Loads the words, scales and zeros of a chunk from the stage at s_stage.
  __device__ __forceinline__ void read(uint32_t s_stage, int warp, int lane, int chunk) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int place = (warp + n * kT.warps) * kT.chunks + chunk;
      const uint32_t s_scale = s_stage + Loader::kScaleAt + place * kInt4ScaleBytes;
      words[n] = load_words_4(s_stage + place * (kInt4ChunkWords * 4) + lane * 16);
      scales[n] = Int4CodeScales<T>(load_word(s_scale + lane / 4 * 4));
      zeros[n] = Int4Zeros<T>(load_words_2(s_scale + 32), lane);
    }
  }

  __device__ __forceinline__ void unpack(int slice) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      int4_unpack<T>(a[slice & 1][n], int4_slice_word(words[n], slice), zeros[n]);
      scales[n].scale(a[slice & 1][n]);
    }
  }

#if TW_HAS_WGMMA
  // Computes acc += A x^T for a slice A of the weight. s_x is the address of the chunk of x.
  __device__ __forceinline__ void multiply(Sums& acc, uint32_t s_x, int slice) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint32_t offset = m * kWgmmaN * (kInt4ChunkK * 2) + slice * 32;
        Wgmma<T, kWgmmaN>::template multiply<0>(acc[n][m], a[slice & 1][n],
                                                k_major_descriptor(s_x) + (offset >> 4), 1);
      }
    }
    wgmma_commit();
  }
#endif
};

template <typename T, int kTile>
__global__ void __launch_bounds__(kInt4LargeMTiles[kTile].threads(), kInt4LargeMTiles[kTile].blocks)
    int4_large_m_kernel(const __grid_constant__ Int4LinearParams p,
                        const __grid_constant__ FastDivisor group_chunks, uint32_t items) {
#if TW_HAS_WGMMA
  constexpr Int4LargeMTile kT = kInt4LargeMTiles[kTile];
  constexpr int kStages = kT.stages, kAhead = kStages - 2, kStageBytes = kT.stage_bytes();
  using Warp = Int4LargeMWarp<T, kTile>;
  using Loader = Int4LargeMLoader<T, kTile>;
  extern __shared__ __align__(1024) char s_memory[];
  const uint32_t s_base = shared_address(s_memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  uint32_t item = blockIdx.x;
  Int4WorkTile work(p, kT, item);
  Loader loader(p, work, thread);
  int left;  // number of k-blocks that are not loaded yet
  const auto start = [&] {
    left = (work.chunks() + kT.chunks - 1) / kT.chunks;
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
      if (stage < left) loader.load(s_base + stage * kStageBytes, group_chunks, thread);
      copy_async_commit();
    }
  };
  start();
  typename Warp::Sums acc;
  while (true) {
    const int k_blocks = left;
    left -= kAhead;
    int4_clear(acc);
    Warp w;
    int stage = 0, free_stage = kAhead;
    copy_async_wait<kAhead - 1>();
    __syncwarp();
    w.read(s_base, warp, lane, 0);
    w.unpack(0);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      const int next = stage + 1 == kStages ? 0 : stage + 1;
      const uint32_t s_stage = s_base + stage * kStageBytes;
      async_fence();
      __syncthreads();  // the k-block has arrived, and all wgmmas but the last one are done
#pragma unroll
      for (int chunk = 0; chunk < kT.chunks; ++chunk) {
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
          w.multiply(acc, s_stage + Loader::kXAt + chunk * kT.tokens * (kInt4ChunkK * 2), slice);
          if (chunk == 0 && slice == 0) {
            if (left > 0) loader.load(s_base + free_stage * kStageBytes, group_chunks, thread);
            copy_async_commit();
            --left;
          }
          if (slice == 3 && chunk + 1 < kT.chunks) w.read(s_stage, warp, lane, chunk + 1);
          if (slice == 3 && chunk + 1 == kT.chunks) {
            copy_async_wait<kAhead - 1>();
            __syncwarp();
            // NOTE: after the last k-block, this code reads and unpacks data that is not
            // multiplied.
            w.read(s_base + next * kStageBytes, warp, lane, 0);
          }
          wgmma_wait<1>();  // wgmma has read the registers of the previous slice
          w.unpack((slice + 1) & 3);
        }
      }
      stage = next;
      free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
    }
    wgmma_wait<0>();
    copy_async_wait<0>();
    __syncthreads();  // every warp is done with the ring
    if (p.choice.splits > 1) break;
    const Int4WorkTile done = work;
    item += gridDim.x;
    if (kT.persistent && item < items) {
      work = Int4WorkTile(p, kT, item);
      loader = Loader(p, work, thread);
      start();
    }
    char* s_y = s_memory + (kT.persistent ? kT.ring_bytes() : 0);
    int4_large_m_stage<T, kTile>(p.gemm, done.first_row, shared_address(s_y), acc, warp, lane);
    __syncthreads();
    int4_large_m_store<T, kTile>(p.gemm, done, s_y, thread);
    if (!kT.persistent || item >= items) return;
  }

  float* s_sums = reinterpret_cast<float*>(s_memory);
#pragma unroll
  for (int n = 0; n < Warp::kN; ++n) {
    auto& sums = reinterpret_cast<float (&)[kT.tokens / 8][4]>(acc[n]);
    int4_stage_sums<kT.sum_row_floats()>(s_sums, sums, warp + n * kT.warps, lane);
  }
  cluster_arrive();
  cluster_wait();
  const GemmParams& g = p.gemm;
  const Int4Output out = {g.y,
                          g.epilogue.bias,
                          g.y_row_stride,
                          g.n,
                          work.first_row,
                          work.first_token,
                          work.tokens_left(p, kT.tokens)};
  const auto reduce = [&](auto splits) {
    int4_reduce_to_y<T, kT.rows, kT.threads(), splits.value>(out, 1.f, work.split, s_sums, thread);
  };
  if (p.choice.splits == 2) reduce(std::integral_constant<int, 2>());
  if (p.choice.splits == 4) reduce(std::integral_constant<int, 4>());
  if (p.choice.splits == 8) reduce(std::integral_constant<int, 8>());
  __syncwarp();
  cluster_arrive();
  cluster_wait();  // wait until the other blocks have read the partials of this block
#endif
}

template <typename T, int kTile>
void launch_int4_large_m_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4LargeMTile kT = kInt4LargeMTiles[kTile];
  const auto kernel = int4_large_m_kernel<T, kTile>;
  const int64_t items = (p.gemm.n + kT.rows - 1) / kT.rows *
                        ((p.gemm.m + kT.tokens - 1) / kT.tokens) * p.choice.splits;
  const bool persistent = kT.persistent && p.choice.splits == 1;
  const int64_t blocks = persistent ? std::min(items, int64_t{p.sms} * kT.blocks) : items;
  const FastDivisor group_chunks(p.weight.shape.group_units() / kInt4ChunkUnits);
  Grid grid(blocks, kT.threads(), kT.shared_bytes());
  grid.cluster = p.choice.splits;
  launch_kernel(kernel, grid, stream, p, group_chunks, static_cast<uint32_t>(items));
}

template <typename T>
void launch_int4_large_m_of(const Int4LinearParams& p, cudaStream_t stream) {
  dispatch_index<kInt4LargeMTileCount>(
      p.choice.tile, [&](auto tile) { launch_int4_large_m_kernel<T, tile.value>(p, stream); });
}

}  // namespace torchweld
