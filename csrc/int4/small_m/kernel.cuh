// y = x @ W^T + bias for a repacked 4-bit weight W and 17 rows of x or some more, on Hopper's
// products of warpgroups.
//
// A block owns rows of W by a tile of tokens, and a part of K; the parts of a tile are a cluster,
// which adds its sums through distributed shared memory in a fixed order. The weight goes from
// global memory to the registers of the warp that multiplies it, `deep` steps ahead; x goes through
// a pipeline of large stages, all of them on their way from the start. There is one block an SM, so
// that x is read once for all of its warps. A warp has 16 rows of W, and some chunks of every step:
// warpgroups of the same rows divide them. It unpacks a slice of 16 columns while the tensor cores
// multiply the slice before.
//
// A kernel begins while the one before it ends, and reads nothing until that one is done.
//
// Rounding: codes less zeros are exact; a weight is rounded once to the dtype of x.
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
// A warp's weights: words of the next steps, and the fragments of two slices.
template <typename T, int kTile>
class Int4SmallMWarp {
  static constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  static constexpr int kOwn = kT.own_chunks(), kChunkBytes = kInt4ChunkWords * 4;
  static constexpr bool kLifted = kInt4SmallMLifted<T>;
  static_assert(kOwn * kT.splits() == kT.chunks && kT.splits() * kT.row_tiles() == kT.warps);

 public:
  __device__ __forceinline__ Int4SmallMWarp(const Int4SmallMParams& p,
                                            const Int4SmallMWorkTile& work, int tile, int split,
                                            int lane)
      : zero_place_(lane), left_(work.count - split * kOwn) {
    const int64_t first = int64_t{work.first_tile + tile} * p.chunks + work.first_chunk;
    g_words_ = p.words + (first + split * kOwn) * kChunkBytes + lane * 16;
    if (work.first_tile + tile >= p.tiles) left_ = 0;
#pragma unroll
    for (auto& step : words_) {
#pragma unroll
      for (uint4& words : step) words = make_uint4(0, 0, 0, 0);
    }
  }

  // The words of chunk i of the next step to read, where there are any.
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

  // acc += a @ x^T for a slice of the chunk of x at s_x.
  __device__ __forceinline__ void multiply(Int4SmallMSums<kTile>& acc, uint32_t s_x, int slice) {
    wgmma_fence();
    Wgmma<T, kT.tokens>::template multiply<0>(acc, a_[slice & 1],
                                              k_major_descriptor(s_x) + (slice * 32 >> 4), 1);
    wgmma_commit();
  }

 private:
  uint32_t a_[2][4];
  uint4 words_[kT.deep][kOwn];
  Int4CodeScales<T> scales_;
  std::conditional_t<kLifted, Int4LiftedZeros, Int4Zeros<T>> zeros_;
  Int4ZeroPlace<T> zero_place_;
  const char* g_words_;  // of the next step to read, this lane's
  int left_;             // chunks from the warp's first of that step on
};
#endif

template <typename T, int kTile>
__global__ void __launch_bounds__(kInt4SmallMTiles[kTile].threads(), Int4SmallMTile::blocks)
    int4_small_m_kernel(const __grid_constant__ Int4SmallMParams p) {
#if TW_HAS_WGMMA
  constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  constexpr int kStages = kT.stages, kAhead = kStages - 2, kStageBytes = kT.stage_bytes();
  constexpr int kOwn = kT.own_chunks(), kXChunk = kT.tokens * kInt4ChunkK * 2;
  extern __shared__ __align__(1024) char s_memory[];
  griddep_launch_dependents();
  const uint32_t s_base = shared_address(s_memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int split = warp / kT.row_tiles(), tile = warp % kT.row_tiles();
  const Int4SmallMWorkTile work(p, kT, rank_in_cluster(), cluster_index());
  const int steps = (work.count + kT.chunks - 1) / kT.chunks;
  Int4SmallMWarp<T, kTile> w(p, work, tile, split, lane);
  Int4SmallMLoader<kTile> loader(p, work, thread);
  griddep_wait();

  int left = steps;  // to load
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    if (stage < left) loader.load(s_base + stage * kStageBytes, p.group_chunks, thread);
    copy_async_commit();
  }
  left -= kAhead;
#pragma unroll
  for (int d = 0; d < kT.deep; ++d) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) w.read_words(d, i);
    w.advance();
  }
  Int4SmallMSums<kTile> acc;
#pragma unroll
  for (float& sum : acc) sum = 0.f;
  copy_async_wait<kAhead - 1>();
  async_fence();
  __syncthreads();
  const int first_own = split * kOwn;
  w.read_scales(s_base, tile, first_own, lane);
  w.unpack(0, 0, 0);
  uint32_t s_stage = s_base, s_free = s_base + kAhead * kStageBytes;
  const uint32_t s_end = s_base + kStages * kStageBytes;
#pragma unroll 1
  for (int step = 0; step < steps; step += kT.deep) {
#pragma unroll
    for (int d = 0; d < kT.deep; ++d) {
      if (d > 0 && step + d >= steps) break;
      const uint32_t s_x = s_stage + first_own * kXChunk;
      const uint32_t s_next = s_stage + kStageBytes == s_end ? s_base : s_stage + kStageBytes;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
          w.multiply(acc, s_x + i * kXChunk, slice);
          if (i == 0 && slice == 0) {
            // The stage of two steps ago: every warp's products of it are done.
            if (left > 0) loader.load(s_free, p.group_chunks, thread);
            copy_async_commit();
            --left;
          }
          if (slice == 3 && i + 1 < kOwn) w.read_scales(s_stage, tile, first_own + i + 1, lane);
          if (slice == 3 && i + 1 == kOwn) {
            copy_async_wait<kAhead - 1>();
            async_fence();
            __syncthreads();  // the next step is there
            // NOTE: behind the last step this reads and unpacks what nobody multiplies.
            w.read_scales(s_next, tile, first_own, lane);
          }
          wgmma_wait<1>();  // the slice before has left its registers
          if (slice < 3) {
            w.unpack(d, i, slice + 1);
          } else if (i + 1 < kOwn) {
            w.unpack(d, i + 1, 0);
          } else {
            w.unpack((d + 1) % kT.deep, 0, 0);
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
  __syncthreads();  // the ring is free
  int4_small_m_finish<T, kTile>(p, work, s_memory, acc, split, tile, lane);
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
                                p.choice.parts,
                                static_cast<int>(p.choice.part_chunks),
                                FastDivisor(shape.group_units() / kInt4ChunkUnits)};
  const int64_t row_blocks = (p.gemm.n + kT.rows - 1) / kT.rows;
  const int64_t token_blocks = (p.gemm.m + kT.tokens - 1) / kT.tokens;
  Grid grid(row_blocks * p.choice.parts, kT.threads(), kT.shared_bytes());
  grid.blocks.y = static_cast<unsigned>(token_blocks);
  grid.cluster = p.choice.parts;
  grid.overlaps = true;
  launch_kernel(kernel, grid, stream, params);
}

template <typename T>
void launch_int4_small_m_of(const Int4LinearParams& p, cudaStream_t stream) {
  dispatch_index<kInt4SmallMTileCount>(
      p.choice.tile, [&](auto tile) { launch_int4_small_m_kernel<T, tile.value>(p, stream); });
}

}  // namespace torchweld
