// Computes y = x @ W^T + bias for a repacked 4-bit weight W, on the tensor cores of sm_80 and
// newer.
//
// A block computes a tile of y (rows of W by tokens) for a split of K. cp.async fills a ring of
// stages in shared memory. The weight is operand A. Each warp has its own rows and all tokens of
// the block, so that a block unpacks every code only once. The accumulators hold y^T. They go
// through shared memory, so that each thread can write 8 contiguous columns of y.
//
// The splits of a tile form a cluster. The blocks of the cluster add up their partials through
// distributed shared memory. On devices without clusters, the kernel of launch_gemm_sum adds the
// partials. In both cases the partials are added in a fixed order.
//
// Rounding: code - zero is exact. In tiles for few tokens and with fp32 x, the scales multiply the
// fp32 sums of groups, so only y is rounded. In tiles for many tokens, the scales multiply the
// codes, so each weight is rounded once, to the dtype of x. The second way needs only half as many
// accumulators. fp32 x is split into three bf16 terms, and the products of these terms are exact.
//
// Source: Frantar et al., "MARLIN", 2024, for the offline order of the codes, the ring, and the
// treatment of small batches.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "int4/fragments.cuh"
#include "int4/sync/finish.cuh"
#include "int4/sync/loader.cuh"

namespace torchweld {

struct Int4Divisors {
  FastDivisor group_chunks, group_units;
};

// The accumulators of a warp: [row tile][group of 8 tokens][fragment].
template <int kN, int kM>
using Int4Sums = float[kN][kM][4];

template <typename T, int kTile>
struct Int4Warp {
  static constexpr Int4Tile kT = kInt4Tiles[kTile];
  static constexpr int kN = kT.row_tiles() / kT.warps, kM = kT.tokens / 8;
  using U = Int4Factor<T>;
  using Reader = Int4XReader<T, kT.tokens>;
  using Sums = Int4Sums<kN, kM>;

  using Loader = Int4Loader<T, kTile, true>;

  int lane, first_tile;  // first_tile is the index of the warp's first row tile in the block
  // The shared-memory addresses of this lane's data in the first stage.
  uint32_t s_words, s_x, s_scale, s_zero;
  Reader x;

  __device__ __forceinline__ Int4Warp(int thread, uint32_t s_base)
      : lane(thread % 32), first_tile(thread / 32 * kN) {
    const int offset = first_tile * kT.chunks;
    s_words = s_base + (offset * 32 + lane) * 16;
    s_x = s_base + kT.weight_bytes() + Reader::offset(lane);
    s_scale = s_base + Loader::kScaleAt + (offset * 8 + lane / 4) * sizeof(Vec<T, 2>);
    s_zero = s_base + Loader::kZeroAt + offset * 8;
  }

  // Loads a lane's four words of a chunk, one word per slice. `stage` is the byte offset of the
  // stage in the ring.
  __device__ __forceinline__ uint4 words(int stage, int n, int chunk) const {
    return load_words_4(s_words + stage + (n * kT.chunks + chunk) * 512);
  }

  // Computes sums += A x^T for one slice. `a` holds one fragment of the weight A per row tile.
  __device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&a)[kN][4], int stage,
                                           int chunk, int slice) {
#pragma unroll
    for (int i = 0; i < kM / Reader::kCount; ++i) {
      x.load(s_x + stage, chunk, i, slice);
#pragma unroll
      for (int c = 0; c < Reader::kCount; ++c) {
        // NOTE: the smallest terms of fp32 x are multiplied first.
#pragma unroll
        for (int term = Reader::kTerms - 1; term >= 0; --term) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            mma_16816<U>(sums[n][i * Reader::kCount + c], a[n], x.r[c][term][0], x.r[c][term][1]);
          }
        }
      }
    }
  }

  // Computes acc += scales * sums for row tile n, then sets the sums of this row tile to 0.
  static __device__ __forceinline__ void add_scaled(Sums& acc, Sums& sums, int n,
                                                    const Int4RowScales<T>& scales) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[n][m][i] = fmaf(i < 2 ? scales.low : scales.high, sums[n][m][i], acc[n][m][i]);
        sums[n][m][i] = 0.f;
      }
    }
  }
};

// A chunk in a stage of the ring. The kernel uses this class only if every chunk lies in one group.
template <typename T, int kTile>
struct Int4Chunk {
  static constexpr Int4Tile kT = kInt4Tiles[kTile];
  using Warp = Int4Warp<T, kTile>;
  using U = typename Warp::U;
  static constexpr int kN = Warp::kN;

  int stage, chunk;

  __device__ __forceinline__ Vec<T, 2> scale(const Warp& warp, int n) const {
    const uint32_t s_from =
        warp.s_scale + stage + (n * kT.chunks + chunk) * kInt4TileRows * sizeof(T);
    if constexpr (sizeof(T) == 2) {
      const uint32_t pair = load_word(s_from);
      return reinterpret_cast<const Vec<T, 2>&>(pair);
    } else {
      const uint2 pair = load_words_2(s_from);
      return reinterpret_cast<const Vec<T, 2>&>(pair);
    }
  }
  __device__ __forceinline__ Int4Zeros<U> zeros(const Warp& warp, int n) const {
    return {load_words_2(warp.s_zero + stage + (n * kT.chunks + chunk) * 8), warp.lane};
  }

  // Computes acc += W x^T for the chunk. The scale multiplies the sums of the chunk.
  template <bool kSpecial>
  __device__ __forceinline__ void add_sums(typename Warp::Sums& acc, Warp& warp,
                                           Int4RowScales<T> (&scales)[kN]) const {
    uint4 words[kN];
    Int4Zeros<U> zero[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      words[n] = warp.words(stage, n, chunk);
      zero[n] = zeros(warp, n);
    }
    typename Warp::Sums sums;
    int4_clear(sums);
    uint32_t a[kN][4];
    // The path for inf and NaN scales (kSpecial) is rare, so its code is kept small.
    constexpr int kUnroll = kSpecial ? 1 : 4;
#pragma unroll kUnroll
    for (int slice = 0; slice < 4; ++slice) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        int4_unpack<U>(a[n], int4_slice_word(words[n], slice), zero[n]);
        if constexpr (kSpecial) scales[n].scale_codes(a[n]);
      }
      warp.multiply(sums, a, stage, chunk, slice);
      // NOTE: without this barrier the compiler interleaves the slices and spills registers.
      if (sizeof(T) == 4) __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if constexpr (kSpecial) scales[n].keep_finite();
      Warp::add_scaled(acc, sums, n, scales[n]);
    }
  }

  // Computes acc += W x^T for the chunk. The scale multiplies the codes, and the products are
  // rounded.
  __device__ __forceinline__ void add_rounded(typename Warp::Sums& acc, Warp& warp) const {
    uint4 words[kN];
    Int4Zeros<U> zero[kN];
    uint32_t a[kN][4];
    Int4CodeScales<U> scales[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      words[n] = warp.words(stage, n, chunk);
      zero[n] = zeros(warp, n);
      const Vec<T, 2> both = scale(warp, n);
      scales[n] = Int4CodeScales<U>(reinterpret_cast<const uint32_t&>(both));
    }
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        int4_unpack<U>(a[n], int4_slice_word(words[n], slice), zero[n]);
        scales[n].scale(a[n]);
      }
      warp.multiply(acc, a, stage, chunk, slice);
      // NOTE: without this barrier the compiler interleaves the slices and spills registers.
      __syncwarp();
    }
  }

  __device__ __forceinline__ void add(typename Warp::Sums& acc, Warp& warp) const {
    if constexpr (kT.scale_sums) {
      Int4RowScales<T> scales[kN];
      bool special = false;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        scales[n] = Int4RowScales<T>(scale(warp, n));
        special |= scales[n].special();
      }
      if (__any_sync(~0u, special)) return add_sums<true>(acc, warp, scales);
      add_sums<false>(acc, warp, scales);
    } else {
      add_rounded(acc, warp);
    }
  }
};

// Computes acc += W x^T for a chunk whose units may belong to different groups. The function issues
// one mma of 16 columns per unit. The other 8 columns of the mma belong to another unit and are
// zeroed in both operands. The function loads scales and zeros from global memory.
template <typename T, int kTile>
__device__ __forceinline__ void int4_units(typename Int4Warp<T, kTile>::Sums& acc,
                                           Int4Warp<T, kTile>& warp, const Int4Weight& weight,
                                           const FastDivisor& group_units, int stage, int chunk,
                                           int64_t global_chunk, int64_t first_tile) {
  using Warp = Int4Warp<T, kTile>;
  using U = typename Warp::U;
  using Reader = typename Warp::Reader;
  constexpr int kN = Warp::kN;
  uint4 words[kN];
#pragma unroll
  for (int n = 0; n < kN; ++n) words[n] = warp.words(stage, n, chunk);
  typename Warp::Sums sums;
  int4_clear(sums);
  const int64_t first_unit = global_chunk * kInt4ChunkUnits;
  const int units =
      static_cast<int>(min(int64_t{kInt4ChunkUnits}, weight.shape.units() - first_unit));
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    const int slice = unit / 2, half = unit % 2;
    const uint32_t group = group_units.divide(static_cast<uint32_t>(first_unit + unit));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int64_t tile = first_tile + warp.first_tile + n;
      if (tile >= weight.shape.tiles()) continue;  // the condition is the same for the whole warp
      const int64_t tile_group = tile * weight.shape.groups + group;
      Int4RowScales<T> scales(static_cast<const Vec<T, 2>*>(
          weight.scale)[tile_group * (kInt4TileRows / 2) + warp.lane / 4]);
      const Int4Zeros<U> zeros(reinterpret_cast<const uint2*>(weight.zero)[tile_group], warp.lane);
      uint32_t a[4];
      int4_unpack<U>(a, int4_slice_word(words[n], slice), zeros);
      if (__any_sync(~0u, scales.special())) {
        scales.scale_codes(a);
        scales.keep_finite();
      }
      const uint32_t unit_a[4] = {half ? 0u : a[0], half ? 0u : a[1], half ? a[2] : 0u,
                                  half ? a[3] : 0u};
#pragma unroll
      for (int i = 0; i < Warp::kM / Reader::kCount; ++i) {
        warp.x.load(warp.s_x + stage, chunk, i, slice);
#pragma unroll
        for (int c = 0; c < Reader::kCount; ++c) {
#pragma unroll
          for (int term = Reader::kTerms - 1; term >= 0; --term) {
            const uint32_t* b = warp.x.r[c][term];
            mma_16816<U>(sums[n][i * Reader::kCount + c], unit_a, half ? 0u : b[0],
                         half ? b[1] : 0u);
          }
        }
      }
      Warp::add_scaled(acc, sums, n, scales);
    }
  }
}

template <typename T, int kTile, bool kWholeChunks>
__global__ void __launch_bounds__(kInt4Tiles[kTile].threads(),
                                  kInt4Tiles[kTile].blocks_per_sm(sizeof(T)))
    int4_kernel(const __grid_constant__ Int4LinearParams p,
                const __grid_constant__ Int4Divisors divisors) {
  constexpr Int4Tile kT = kInt4Tiles[kTile];
  constexpr int kStageBytes = kT.stage_bytes(sizeof(T)), kStages = kT.stages;
  using Warp = Int4Warp<T, kTile>;
  extern __shared__ __align__(128) char s_ring[];
  const int thread = threadIdx.x;
  const Int4WorkTile work(p, kT, blockIdx.x);
  const int k_blocks = (work.chunks() + kT.chunks - 1) / kT.chunks;

  Int4Loader<T, kTile, kWholeChunks> loader(p, work, thread);
  const uint32_t s_base = shared_address(s_ring);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < k_blocks) loader.load(s_base + stage * kStageBytes, divisors.group_chunks, thread);
    copy_async_commit();
  }

  Warp warp(thread, s_base);
  typename Warp::Sums acc;
  int4_clear(acc);
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // the k-block has arrived, and every warp is done with the previous one
    if (k_block + kStages - 1 < k_blocks) {
      loader.load(s_base + free_stage * kStageBytes, divisors.group_chunks, thread);
    }
    copy_async_commit();
    constexpr int kUnroll = sizeof(T) == 4 ? 1 : kT.chunks;  // fp32 terms need many registers
#pragma unroll kUnroll
    for (int chunk = 0; chunk < kT.chunks; ++chunk) {
      if constexpr (kWholeChunks) {
        Int4Chunk<T, kTile>{stage * kStageBytes, chunk}.add(acc, warp);
      } else {
        const int64_t global_chunk = work.first_chunk + k_block * kT.chunks + chunk;
        // This chunk and the following chunks belong to the next split.
        if (global_chunk >= work.chunk_end) break;
        int4_units<T, kTile>(acc, warp, p.weight, divisors.group_units, stage * kStageBytes, chunk,
                             global_chunk, work.first_row / kInt4TileRows);
      }
    }
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // every warp is done with the ring

  float* s_sums = reinterpret_cast<float*>(s_ring);
#pragma unroll
  for (int n = 0; n < Warp::kN; ++n) {
    int4_stage_sums<kT.sum_row_floats()>(s_sums, acc[n], warp.first_tile + n, warp.lane);
  }
#if TW_HAS_CLUSTERS
  if (p.choice.cluster) {
    cluster_arrive();
    cluster_wait();
    int4_finish<T, kTile>(p, work, s_sums);
    cluster_arrive();
    cluster_wait();  // wait until the other blocks have read the partials of this block
    return;
  }
#endif
  __syncthreads();
  int4_finish<T, kTile>(p, work, s_sums);
}

template <typename T, int kTile, bool kWholeChunks>
void launch_int4_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4Tile kT = kInt4Tiles[kTile];
  const auto kernel = int4_kernel<T, kTile, kWholeChunks>;
  const int64_t tiles =
      (p.gemm.n + kT.rows - 1) / kT.rows * ((p.gemm.m + kT.tokens - 1) / kT.tokens);
  const int64_t units = p.weight.shape.group_units();
  const Int4Divisors divisors = {FastDivisor(kWholeChunks ? units / kInt4ChunkUnits : 1),
                                 FastDivisor(units)};
  Grid grid(tiles * p.choice.splits, kT.threads(), kT.shared_bytes(sizeof(T)));
  grid.cluster = p.choice.cluster ? p.choice.splits : 1;
  launch_kernel(kernel, grid, stream, p, divisors);
}

template <typename T>
void launch_int4_linear_of(const Int4LinearParams& p, cudaStream_t stream) {
  const Int4Shape& shape = p.weight.shape;
  const bool whole_chunks = shape.k % (shape.groups * kInt4ChunkK) == 0;
  dispatch_index<kInt4TileCount>(p.choice.tile, [&](auto index) {
    constexpr int kElem = sizeof(T), kTile = index.value;
    if constexpr (kInt4Tiles[kTile].supports(kElem, true)) {
      if (whole_chunks) return launch_int4_kernel<T, kTile, true>(p, stream);
    }
    if constexpr (kInt4Tiles[kTile].supports(kElem, false)) {
      launch_int4_kernel<T, kTile, false>(p, stream);
    }
  });
}

}  // namespace torchweld
