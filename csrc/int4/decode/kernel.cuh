// Computes y = x @ W^T + bias for a repacked 4-bit weight W and at most 16 rows of 16-bit x. Most
// of the kernel's time is one read of the weight. All of x must fit into the shared memory of a
// block or of a cluster of four blocks.
//
// An owner is a block, or a cluster with one block per split of K. An owner processes consecutive
// tiles of 16 rows of W. The warps of a block divide the k-blocks of these tiles evenly. Each warp
// loads its k-blocks directly into registers, one k-block ahead. If several warps compute the same
// tile, their accumulators are added up in a fixed order. The warps wait for each other only before
// this addition. A slice of a k-block lies in one group, and the scale of the group multiplies the
// accumulators of the slice.
//
// The speed of the kernel is limited by the latency of a warp, not by memory bandwidth. Therefore
// the weight bypasses shared memory, and k-blocks are long and have no branch
// (int4/decode/config.h).
//
// With PDL the kernel starts before the previous kernel ends. The previous kernel may write the
// weight. Therefore, before griddep_wait, the kernel only prefetches the weight to L2, because L2
// is coherent. More loads in flight make the kernel slower, because they delay x. The kernel takes
// 9.1 us for int4 (1, 4096, 14336) bfloat16. A version with a pipeline of bulk or asynchronous
// copies took 10.1 us, and so did a version with prefetches in the loop. While all SMs read, a byte
// from L2 costs as much as a byte from memory. Therefore two blocks load x for each other by
// multicast.
//
// Rounding: code - zero is exact, accumulators are fp32, and only y is rounded.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "int4/decode/loader.cuh"

namespace torchweld {

// Adds the bias to the sums of weight rows `row` and `row` + 1, rounds the results and stores them.
// Rows from p.rows on are not stored.
template <typename T>
__device__ __forceinline__ void int4_decode_store(const Int4DecodeParams& p, int row, int token,
                                                  float2 sum) {
  float v[2] = {sum.x * kInt4Lift<T>, sum.y * kInt4Lift<T>};
  T* g_to = static_cast<T*>(p.y) + token * p.y_row_stride + row;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= p.rows) return;
    if (p.bias != nullptr) v[i] += to_float(static_cast<const T*>(p.bias)[row + i]);
    g_to[i] = from_float<T>(v[i]);
  }
}

// A round of an owner's work. It has at most kRoundTiles consecutive tiles.
struct Int4DecodeRound {
  int first_tile, tiles, left;  // `left`: number of tiles that the owner has from first_tile on

  // NOTE: every use of a round recomputes it from the block index, to save registers.
  __device__ __forceinline__ Int4DecodeRound(const Int4DecodePlan& plan, int splits, int round) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int owner = block / splits, done = round * Int4DecodeTile::kRoundTiles;
    first_tile = owner * plan.base_tiles + min(owner, plan.extra_tiles) + done;
    left = plan.base_tiles + (owner < plan.extra_tiles) - done;
    tiles = min(Int4DecodeTile::kRoundTiles, left);
  }
};

// Reduces the accumulators of a round's tiles and stores y, a pair of weight rows at a time. The
// blocks of a cluster send their partials to each other. Each block adds up the partials of one
// slice of these pairs, in the order of the splits.
template <typename T, int kTile>
__device__ __forceinline__ void int4_decode_finish(const Int4DecodeParams& p,
                                                   const Int4DecodeRound& round,
                                                   const float* s_sums, float2* s_partials,
                                                   uint64_t* s_barrier, uint32_t parity,
                                                   int split) {
  using Math = Int4DecodeMath<T, kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kTilePairs = kInt4TileRows / 2;
  const Int4DecodePartition partition(round.tiles * p.plan.split_k_blocks);
  const int pairs = round.tiles * p.tokens * kTilePairs;
  [[maybe_unused]] const int slice = (pairs + kT.splits - 1) / kT.splits;
  const auto store = [&](int i, float2 sum) {
    const int tile = p.plan.tokens.divide(i / kTilePairs), token = i / kTilePairs - tile * p.tokens;
    const int row = (round.first_tile + tile) * kInt4TileRows + i % kTilePairs * 2;
    int4_decode_store<T>(p, row, token, sum);
  };
#if TW_HAS_CLUSTERS
  const int count = max(0, min(slice, pairs - split * slice));
  if (kT.splits > 1 && threadIdx.x == 0)
    mbarrier_arrive_expect_tx(s_barrier, count * kT.splits * sizeof(float2));
#endif
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += kT.kThreads) {
    const int tile = p.plan.tokens.divide(i / kTilePairs), token = i / kTilePairs - tile * p.tokens;
    const uint32_t first = partition.warp_of(tile * p.plan.split_k_blocks);
    const uint32_t last = partition.warp_of((tile + 1) * p.plan.split_k_blocks - 1);
    const float* s_from =
        s_sums + (first + tile) * p.plan.sum_floats + Math::sum_offset(token, i % kTilePairs * 2);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 4
    for (uint32_t w = first; w <= last; ++w) {
      const float2 partial = *reinterpret_cast<const float2*>(s_from);
      sum.x += partial.x;
      sum.y += partial.y;
      s_from += p.plan.sum_floats;
    }
    if constexpr (kT.splits == 1) {
      store(i, sum);
    } else {
#if TW_HAS_CLUSTERS
      const int rank = i / slice;
      send_to_block(s_partials + split * p.plan.split_pairs + i - rank * slice, sum, s_barrier,
                    rank);
#endif
    }
  }
#if TW_HAS_CLUSTERS
  if constexpr (kT.splits > 1) {
    mbarrier_wait(s_barrier, parity);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kT.kThreads) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int from = 0; from < kT.splits; ++from) {
        const float2 partial = s_partials[from * p.plan.split_pairs + i];
        sum.x += partial.x;
        sum.y += partial.y;
      }
      store(split * slice + i, sum);
    }
  }
#endif
}

// The k-blocks that a warp computes in a round.
struct Int4DecodeRange {
  int slot;              // the slot for the sums of the first tile; next tiles use the next slots
  uint32_t k_block, in;  // the index of the first k-block in the weight, and its index in the split
  uint32_t count;        // the number of k-blocks

  __device__ __forceinline__ Int4DecodeRange(const Int4DecodePlan& plan, const Int4DecodeTile& tile,
                                             int round) {
    const Int4DecodeRound work(plan, tile.splits, round);
    const Int4DecodePartition partition(work.tiles * plan.split_k_blocks);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t begin = partition.begin(warp), begin_tile = plan.split_divisor.divide(begin);
    // Warp w stores its sums of tile t in slot w + t. Two warps never use the same slot, because
    // warp w + 1 begins at the last tile of warp w or at a later tile.
    slot = warp + begin_tile;
    in = begin - begin_tile * plan.split_k_blocks;
    k_block = (work.first_tile + begin_tile) * plan.k_blocks +
              blockIdx.x % tile.splits * plan.split_k_blocks + in;
    count = partition.count(warp);
  }
};

// Computes the accumulators of each tile in the warp's range and stores them in the slots of the
// tiles. Returns whether any accumulator is inf or NaN.
template <typename T, int kTile, bool kSpecial>
__device__ __forceinline__ bool int4_decode_add(
    const Int4DecodeParams& p, Int4DecodeRange range, Int4DecodeX<T, kTile>& x,
    const Int4DecodeLoader<kTile>& loader,
    typename Int4DecodeLoader<kTile>::Slice (&slices)[kInt4DecodeTiles[kTile].slices],
    const uint32_t (&s_x)[Int4DecodeMath<T, kTile>::kGroups], const Int4ZeroPlace<T>& zero_place,
    float* s_sums, int lane) {
  using Math = Int4DecodeMath<T, kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kXSlice = kT.chunks * kInt4ChunkK * sizeof(T);
  typename Math::Sums acc = {};
  bool special = false;
  const auto flush = [&] {
    special |= Math::not_finite(acc);
    Math::store(s_sums + range.slot * p.plan.sum_floats, acc, p.tokens, lane);
    ++range.slot;
    range.in = 0;
#pragma unroll
    for (auto& group : acc) {
      for (float& sum : group) sum = 0.f;
    }
  };
#pragma unroll 1
  for (; range.count > 0; --range.count) {
    x.wait(range.in, p.plan);
    ++range.k_block;
    if (kT.splits > 1 && range.in + 1 == p.plan.split_k_blocks) {
      range.k_block += p.plan.k_blocks - p.plan.split_k_blocks;
    }
#pragma unroll
    for (int slice = 0; slice < kT.slices; ++slice) {
      const int offset = (range.in * kT.slices + slice) * kXSlice;
      Math::template add<kSpecial>(acc, slices[slice], zero_place, s_x, offset);
      if (range.count > 1) loader.load(slices[slice], p, range.k_block, slice);
    }
    if (++range.in == p.plan.split_k_blocks) flush();
  }
  if (range.in != 0) flush();
  return special;
}

template <typename T, int kTile>
__global__ void __launch_bounds__(Int4DecodeTile::kThreads, 1)
    int4_decode_kernel(const __grid_constant__ Int4DecodeParams p) {
  using Math = Int4DecodeMath<T, kTile>;
  using Loader = Int4DecodeLoader<kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  if (kT.splits > 1 && !TW_HAS_CLUSTERS)
    return;  // without clusters, the host never launches a tile with more than one split
  extern __shared__ __align__(128) char s_memory[];
  const Int4DecodePlan& plan = p.plan;
  Int4DecodeX<T, kTile> x{reinterpret_cast<uint64_t*>(s_memory),
                          s_memory + Int4DecodePlan::kBarrierBytes};
  griddep_launch_dependents();
  x.prepare(p);
  const int lane = threadIdx.x % 32;
  const int split = blockIdx.x % kT.splits;
  float* s_sums = reinterpret_cast<float*>(s_memory + plan.x_bytes);
  float2* s_partials = reinterpret_cast<float2*>(s_sums + plan.slots * plan.sum_floats);

  // A block without tiles must still load x for the other block of its cluster.
#pragma unroll 1
  for (int round = 0;; ++round) {
    const Int4DecodeRange range(plan, kT, round);
    const Loader loader(p, lane);
    if (round == 0) {
      // NOTE: if the range is small, a prefetch of more than half of the range would delay x.
      const int k_blocks = min((range.count + 1) / 2, plan.split_k_blocks - range.in);
      loader.prefetch(p, range.k_block, min(k_blocks, kT.kPrefetched), lane);
      x.wait_for_cluster();
      griddep_wait();
      x.start(p, split);
    }
    typename Loader::Slice slices[kT.slices];
    const auto load_first = [&](const Int4DecodeRange& from) {
      if (from.count == 0) return;
#pragma unroll
      for (int i = 0; i < kT.slices; ++i) loader.load(slices[i], p, from.k_block, i);
    };
    load_first(range);
    const Int4ZeroPlace<T> zero_place(lane);
    uint32_t s_x[Math::kGroups];
#pragma unroll
    for (int g = 0; g < Math::kGroups; ++g) {
      // Lanes for tokens behind the last token read the last token. The sums of these lanes are not
      // stored.
      const int token = min(lane % 8 + 8 * g, p.tokens - 1);
      s_x[g] = shared_address(x.s_x) + token * plan.x_row_bytes + lane / 8 * 16;
      // NOTE: without this asm the compiler would recompute the address in every k-block.
      asm volatile("" : "+r"(s_x[g]));
    }
    if (round == 0) {
      x.wait();
    } else {
      __syncthreads();  // every warp has read the sums of the previous round
    }
    const bool special = int4_decode_add<T, kTile, false>(p, range, x, loader, slices, s_x,
                                                          zero_place, s_sums, lane);
    // NOTE: an inf or NaN scale makes the sums inf or NaN. In that case the warp computes its range
    // again. In this second computation, inf and NaN scales multiply the codes instead of the sums
    // (see Int4RowScales).
    if (__any_sync(~0u, special)) {
      const Int4DecodeRange retry(plan, kT, round);
      load_first(retry);
      int4_decode_add<T, kTile, true>(p, retry, x, loader, slices, s_x, zero_place, s_sums, lane);
    }
    __syncthreads();
    const Int4DecodeRound work(plan, kT.splits, round);
    int4_decode_finish<T, kTile>(p, work, s_sums, s_partials, x.s_barriers, round % 2, split);
    if (work.tiles == work.left) {
      if (work.left == 0) x.wait_all(plan);
      return;
    }
#if TW_HAS_CLUSTERS
    // Wait until every block of the cluster has read the partials of this round.
    if (kT.splits > 1) {
      cluster_arrive();
      cluster_wait();
    }
#endif
  }
}

template <typename T, int kTile>
void launch_int4_decode_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  const auto kernel = int4_decode_kernel<T, kTile>;
  const Int4DecodeParams params{{p, sizeof(T)},
                                static_cast<int>(p.gemm.m),
                                static_cast<int>(p.gemm.n),
                                {kT, p.gemm.m, p.weight.shape, p.sms}};
  const int64_t blocks = int64_t{params.plan.owners} * kT.splits;
  const int cluster = p.clusters ? kT.cluster() : 1;
  Grid grid(blocks, kT.kThreads, params.plan.shared_bytes);
  grid.cluster = cluster;
  grid.overlaps = p.clusters;
  launch_kernel(kernel, grid, stream, params);
}

template <typename T>
void launch_int4_decode_of(const Int4LinearParams& p, cudaStream_t stream) {
  dispatch_index<kInt4DecodeTileCount>(
      p.choice.tile, [&](auto tile) { launch_int4_decode_kernel<T, tile.value>(p, stream); });
}

}  // namespace torchweld
