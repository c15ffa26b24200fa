// Computes y = x @ W^T + bias for a repacked 4-bit weight W and few rows of x (17 or more), with
// wgmma.
//
// A block computes a tile of y (rows of W by tokens) for a split of K. The splits of a tile form a
// cluster. The blocks of the cluster add up their partials through distributed shared memory, in a
// fixed order. A warp has 16 rows of W. It loads these rows from global memory into registers,
// weight_stages k-blocks ahead. x goes through a ring of large stages in shared memory. An SM runs
// one block, so that x is read once for all warps. Warpgroups with the same rows divide the chunks
// of a k-block among themselves. A warp unpacks a slice of 16 columns while the tensor cores
// multiply the previous slice.
//
// With PDL the kernel starts before the previous kernel ends. Before griddep_wait, the kernel reads
// no global memory.
//
// Rounding: code - zero is exact. Each weight is rounded once, to the dtype of x.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/sm90/wgmma.cuh"
#include "int4/fragments.cuh"
#include "int4/params.h"
#include "int4/small_m/finish.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The weight in a warp's registers: the words of the next weight_stages k-blocks, and the fragments
// of two slices.
template <typename T, int kTile>
class Int4SmallMWarp {
  static constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  static constexpr int kWarpChunks = kT.warp_chunks(), kChunkBytes = kInt4ChunkWords * 4;
  static constexpr bool kLifted = kInt4SmallMLifted<T>;
  static_assert(kWarpChunks * kT.warp_splits() == kT.chunks &&
                kT.warp_splits() * kT.row_tiles() == kT.warps);

 public:
  __device__ __forceinline__ Int4SmallMWarp(const Int4SmallMParams& p,
                                            const Int4SmallMWorkTile& work, int tile,
                                            int warp_split, int lane)
      : zero_place_(lane), left_(work.count - warp_split * kWarpChunks) {
    const int64_t first = int64_t{work.first_tile + tile} * p.chunks + work.first_chunk;
    g_words_ = p.words + (first + warp_split * kWarpChunks) * kChunkBytes + lane * 16;
    if (work.first_tile + tile >= p.tiles) left_ = 0;
#pragma unroll
    for (auto& k_block : words_) {
#pragma unroll
      for (uint4& words : k_block) words = make_uint4(0, 0, 0, 0);
    }
  }

  // Loads the words of chunk i of the next k-block into words_[d][i]. Does nothing if chunk i is
  // behind the end of the split.
  __device__ __forceinline__ void read_words(int d, int i) {
    if (i < left_) words_[d][i] = load_words_once(g_words_ + i * kChunkBytes);
  }
  __device__ __forceinline__ void advance() {
    g_words_ += kT.chunks * kChunkBytes;
    left_ -= kT.chunks;
  }

  __device__ __forceinline__ void read_scales(uint32_t s_stage, int tile, int chunk, int lane) {
    const uint32_t s_scale =
        s_stage + Int4SmallMLoader<kTile>::kScaleAt + (tile * kT.chunks + chunk) * kInt4ScaleBytes;
    scales_ = Int4CodeScales<T>(load_word(s_scale + lane / 4 * 4));
    const uint2 raw = load_words_2(s_scale + 32);
    if constexpr (kLifted) {
      zeros_ = zero_place_.find(raw);
    } else {
      zeros_ = Int4Zeros<T>(raw, lane);
    }
  }

  __device__ __forceinline__ void unpack(int d, int i, int slice) {
    uint32_t (&r)[4] = a_[slice & 1];
    const uint32_t word = int4_slice_word(words_[d][i], slice);
    if constexpr (kLifted) {
      int4_unpack_lifted<T>(r, word, zeros_);
    } else {
      int4_unpack<T>(r, word, zeros_);
    }
    scales_.scale(r);
  }

  // Computes acc += A x^T for a slice A of the weight. s_x is the address of the chunk of x.
  __device__ __forceinline__ void multiply(Int4SmallMSums<kTile>& acc, uint32_t s_x, int slice) {
    wgmma_fence();
    Wgmma<T, kT.tokens>::template multiply<0>(acc, a_[slice & 1],
                                              k_major_descriptor(s_x) + (slice * 32 >> 4), 1);
    wgmma_commit();
  }

 private:
  uint32_t a_[2][4];
  uint4 words_[kT.weight_stages][kWarpChunks];
  Int4CodeScales<T> scales_;
  std::conditional_t<kLifted, Int4LiftedZeros, Int4Zeros<T>> zeros_;
  Int4ZeroPlace<T> zero_place_;
  const char* g_words_;  // the address of this lane's words of the next k-block
  // The number of chunks from the warp's first chunk of the next k-block to the end of the split.
  int left_;
};
#endif

template <typename T, int kTile>
__global__ void __launch_bounds__(kInt4SmallMTiles[kTile].threads(), Int4SmallMTile::blocks)
    int4_small_m_kernel(const __grid_constant__ Int4SmallMParams p) {
#if TW_HAS_WGMMA
  constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  constexpr int kStages = kT.stages, kAhead = kStages - 2, kStageBytes = kT.stage_bytes();
  constexpr int kWarpChunks = kT.warp_chunks(), kXChunk = kT.tokens * kInt4ChunkK * 2;
  extern __shared__ __align__(1024) char s_memory[];
  griddep_launch_dependents();
  const uint32_t s_base = shared_address(s_memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int warp_split = warp / kT.row_tiles(), tile = warp % kT.row_tiles();
  const Int4SmallMWorkTile work(p, kT, rank_in_cluster(), cluster_index());
  const int k_blocks = (work.count + kT.chunks - 1) / kT.chunks;
  Int4SmallMWarp<T, kTile> w(p, work, tile, warp_split, lane);
  Int4SmallMLoader<kTile> loader(p, work, thread);
  griddep_wait();

  int left = k_blocks;  // number of k-blocks that are not loaded yet
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    if (stage < left) loader.load(s_base + stage * kStageBytes, p.group_chunks, thread);
    copy_async_commit();
  }
  left -= kAhead;
#pragma unroll
  for (int d = 0; d < kT.weight_stages; ++d) {
#pragma unroll
    for (int i = 0; i < kWarpChunks; ++i) w.read_words(d, i);
    w.advance();
  }
  Int4SmallMSums<kTile> acc;
#pragma unroll
  for (float& sum : acc) sum = 0.f;
  copy_async_wait<kAhead - 1>();
  async_fence();
  __syncthreads();
  const int first_warp_chunk = warp_split * kWarpChunks;
  w.read_scales(s_base, tile, first_warp_chunk, lane);
  w.unpack(0, 0, 0);
  uint32_t s_stage = s_base, s_free = s_base + kAhead * kStageBytes;
  const uint32_t s_end = s_base + kStages * kStageBytes;
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; k_block += kT.weight_stages) {
#pragma unroll
    for (int d = 0; d < kT.weight_stages; ++d) {
      if (d > 0 && k_block + d >= k_blocks) break;
      const uint32_t s_x = s_stage + first_warp_chunk * kXChunk;
      const uint32_t s_next = s_stage + kStageBytes == s_end ? s_base : s_stage + kStageBytes;
#pragma unroll
      for (int i = 0; i < kWarpChunks; ++i) {
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
          w.multiply(acc, s_x + i * kXChunk, slice);
          if (i == 0 && slice == 0) {
            // Load into the stage that held k-block k_block + d - 2. Every warp has multiplied that
            // k-block.
            if (left > 0) loader.load(s_free, p.group_chunks, thread);
            copy_async_commit();
            --left;
          }
          if (slice == 3 && i + 1 < kWarpChunks)
            w.read_scales(s_stage, tile, first_warp_chunk + i + 1, lane);
          if (slice == 3 && i + 1 == kWarpChunks) {
            copy_async_wait<kAhead - 1>();
            async_fence();
            __syncthreads();  // the next k-block has arrived
            // NOTE: after the last k-block, this code reads and unpacks data that is not
            // multiplied.
            w.read_scales(s_next, tile, first_warp_chunk, lane);
          }
          wgmma_wait<1>();  // wgmma has read the registers of the previous slice
          if (slice < 3) {
            w.unpack(d, i, slice + 1);
          } else if (i + 1 < kWarpChunks) {
            w.unpack(d, i + 1, 0);
          } else {
            w.unpack((d + 1) % kT.weight_stages, 0, 0);
          }
          if (slice == 2) w.read_words(d, i);
        }
      }
      w.advance();
      s_stage = s_next;
      s_free = s_free + kStageBytes == s_end ? s_base : s_free + kStageBytes;
    }
  }
  wgmma_wait<0>();
  copy_async_wait<0>();
  __syncthreads();  // every warp is done with the ring
  int4_small_m_finish<T, kTile>(p, work, s_memory, acc, warp_split, tile, lane);
#endif
}

template <typename T, int kTile>
void launch_int4_small_m_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  const auto kernel = int4_small_m_kernel<T, kTile>;
  const Int4Shape& shape = p.weight.shape;
  const Int4SmallMParams params{{p, sizeof(T)},
                                shape.n,
                                static_cast<int>(p.gemm.m),
                                static_cast<int>(shape.tiles()),
                                static_cast<int>(shape.chunks()),
                                static_cast<int>(shape.groups),
                                p.choice.splits,
                                static_cast<int>(p.choice.split_chunks),
                                FastDivisor(shape.group_units() / kInt4ChunkUnits)};
  const int64_t row_blocks = (p.gemm.n + kT.rows - 1) / kT.rows;
  const int64_t token_blocks = (p.gemm.m + kT.tokens - 1) / kT.tokens;
  Grid grid(row_blocks * p.choice.splits, kT.threads(), kT.shared_bytes());
  grid.blocks.y = static_cast<unsigned>(token_blocks);
  grid.cluster = p.choice.splits;
  grid.overlaps = true;
  launch_kernel(kernel, grid, stream, params);
}

template <typename T>
void launch_int4_small_m_of(const Int4LinearParams& p, cudaStream_t stream) {
  dispatch_index<kInt4SmallMTileCount>(
      p.choice.tile, [&](auto tile) { launch_int4_small_m_kernel<T, tile.value>(p, stream); });
}

}  // namespace torchweld
