// y = x @ W^T + bias for a repacked 4-bit weight W and at most 16 rows of 16-bit x: the time is
// that of reading the weight once. For all sizes whose x a block, or a cluster of four, holds
// whole.
//
// A block, or a cluster of blocks that have parts of K, owns some neighbouring tiles of 16 rows of
// W. Their steps of K, tile after tile, are divided evenly among its warps, which load them
// straight into registers, a step ahead, and meet only to add the sums of tiles that several of
// them have, in a fixed order. A slice of a step is of one group: its scale multiplies sums.
//
// What limits it is not memory but the latency of a warp: hence no shared memory for the weight,
// and long steps without a branch (int4/decode/config.h).
//
// On Hopper a kernel begins while the one before it ends (PDL). That kernel may write the weight,
// so until it has ended lines are only asked for in L2, where they are right whatever is written to
// them. More of the weight on its way is slower, because x waits behind it: a pipeline of bulk or
// asynchronous copies, or lines asked for in the loop, made int4 (1, 4096, 14336) bfloat16 take
// 10.1 us instead of 9.1. Two blocks bring x to each other by multicast: once all SMs read, bytes
// from L2 cost as much as those from memory.
//
// Rounding: codes less zeros are exact, sums are fp32 and nothing else is rounded before y.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/features.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "int4/decode/loader.cuh"

namespace torchweld {

// Adds bias to the sums of two neighbouring rows and rounds. Rows may go beyond the weight's.
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

// A round of a block's tiles.
struct Int4DecodeRound {
  int first_tile, tiles, left;  // left: with these

  // NOTE: from the block's number every time, as registers are short.
  __device__ __forceinline__ Int4DecodeRound(const Int4DecodePlan& plan, int parts, int round) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int owner = block / parts, done = round * Int4DecodeTile::kRoundTiles;
    first_tile = owner * plan.base_tiles + min(owner, plan.more_tiles) + done;
    left = plan.base_tiles + (owner < plan.more_tiles) - done;
    tiles = min(Int4DecodeTile::kRoundTiles, left);
  }
};

// Adds the sums of a round's tiles, of two neighbouring rows at a time. The blocks of a cluster
// send each other theirs: each one finishes an equal share, in the order of the parts.
template <typename T, int kTile>
__device__ __forceinline__ void int4_decode_finish(const Int4DecodeParams& p,
                                                   const Int4DecodeRound& round,
                                                   const float* s_sums, float2* s_parts,
                                                   uint64_t* s_barrier, uint32_t parity, int part) {
  using Math = Int4DecodeMath<T, kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kTilePairs = kInt4TileRows / 2;
  const Int4DecodeShares shares(round.tiles * p.plan.part_steps);
  const int pairs = round.tiles * p.tokens * kTilePairs;
  [[maybe_unused]] const int share = (pairs + kT.parts - 1) / kT.parts;
  const auto store = [&](int i, float2 sum) {
    const int tile = p.plan.tokens.divide(i / kTilePairs), token = i / kTilePairs - tile * p.tokens;
    const int row = (round.first_tile + tile) * kInt4TileRows + i % kTilePairs * 2;
    int4_decode_store<T>(p, row, token, sum);
  };
#if TW_HAS_CLUSTERS
  const int own = max(0, min(share, pairs - part * share));
  if (kT.parts > 1 && threadIdx.x == 0)
    mbarrier_arrive_expect_tx(s_barrier, own * kT.parts * sizeof(float2));
#endif
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += kT.kThreads) {
    const int tile = p.plan.tokens.divide(i / kTilePairs), token = i / kTilePairs - tile * p.tokens;
    const uint32_t first = shares.warp_of(tile * p.plan.part_steps);
    const uint32_t last = shares.warp_of((tile + 1) * p.plan.part_steps - 1);
    const float* s_from =
        s_sums + (first + tile) * p.plan.sum_floats + Math::place(token, i % kTilePairs * 2);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 4
    for (uint32_t w = first; w <= last; ++w) {
      const float2 one = *reinterpret_cast<const float2*>(s_from);
      sum.x += one.x;
      sum.y += one.y;
      s_from += p.plan.sum_floats;
    }
    if constexpr (kT.parts == 1) {
      store(i, sum);
    } else {
#if TW_HAS_CLUSTERS
      const int rank = i / share;
      send_to_block(s_parts + part * p.plan.part_pairs + i - rank * share, sum, s_barrier, rank);
#endif
    }
  }
#if TW_HAS_CLUSTERS
  if constexpr (kT.parts > 1) {
    mbarrier_wait(s_barrier, parity);
#pragma unroll 1
    for (int i = threadIdx.x; i < own; i += kT.kThreads) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int from = 0; from < kT.parts; ++from) {
        const float2 one = s_parts[from * p.plan.part_pairs + i];
        sum.x += one.x;
        sum.y += one.y;
      }
      store(part * share + i, sum);
    }
  }
#endif
}

// A warp's share of a round.
struct Int4DecodeShare {
  int slot;           // for the sums of its first tile; those of the next one follow
  uint32_t step, in;  // the first one, counted from the weight's on, and from its part's on
  uint32_t count;     // of steps

  __device__ __forceinline__ Int4DecodeShare(const Int4DecodePlan& plan, const Int4DecodeTile& tile,
                                             int round) {
    const Int4DecodeRound now(plan, tile.parts, round);
    const Int4DecodeShares shares(now.tiles * plan.part_steps);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t begin = shares.begin(warp), begin_tile = plan.part_divisor.divide(begin);
    // Warps and tiles are in one order, so the sum of both is a slot of its own.
    slot = warp + begin_tile;
    in = begin - begin_tile * plan.part_steps;
    step =
        (now.first_tile + begin_tile) * plan.steps + blockIdx.x % tile.parts * plan.part_steps + in;
    count = shares.count(warp);
  }
};

// The sums of each of the share's tiles, or of the warp's part of one, to their slots. True where
// one of them is not finite.
template <typename T, int kTile, bool kSpecial>
__device__ __forceinline__ bool int4_decode_add(
    const Int4DecodeParams& p, Int4DecodeShare share, Int4DecodeX<T, kTile>& x,
    const Int4DecodeLoader<kTile>& loader,
    typename Int4DecodeLoader<kTile>::Slice (&slices)[kInt4DecodeTiles[kTile].slices],
    const uint32_t (&s_x)[Int4DecodeMath<T, kTile>::kGroups], const Int4ZeroPlace<T>& zero_place,
    float* s_sums, int lane) {
  using Math = Int4DecodeMath<T, kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kXSlice = kT.chunks * kInt4ChunkK * sizeof(T);
  typename Math::Sums acc = {};
  bool special = false;
  const auto leave = [&] {
    special |= Math::not_finite(acc);
    Math::store(s_sums + share.slot * p.plan.sum_floats, acc, p.tokens, lane);
    ++share.slot;
    share.in = 0;
#pragma unroll
    for (auto& group : acc) {
      for (float& sum : group) sum = 0.f;
    }
  };
#pragma unroll 1
  for (; share.count > 0; --share.count) {
    x.wait(share.in, p.plan);
    ++share.step;
    if (kT.parts > 1 && share.in + 1 == p.plan.part_steps) {
      share.step += p.plan.steps - p.plan.part_steps;
    }
#pragma unroll
    for (int slice = 0; slice < kT.slices; ++slice) {
      const int at = (share.in * kT.slices + slice) * kXSlice;
      Math::template add<kSpecial>(acc, slices[slice], zero_place, s_x, at);
      if (share.count > 1) loader.load(slices[slice], p, share.step, slice);
    }
    if (++share.in == p.plan.part_steps) leave();
  }
  if (share.in != 0) leave();
  return special;
}

template <typename T, int kTile>
__global__ void __launch_bounds__(Int4DecodeTile::kThreads, 1)
    int4_decode_kernel(const __grid_constant__ Int4DecodeParams p) {
  using Math = Int4DecodeMath<T, kTile>;
  using Loader = Int4DecodeLoader<kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  if (kT.parts > 1 && !TW_HAS_CLUSTERS) return;  // the host does not choose it
  extern __shared__ __align__(128) char s_memory[];
  const Int4DecodePlan& plan = p.plan;
  Int4DecodeX<T, kTile> x{reinterpret_cast<uint64_t*>(s_memory),
                          s_memory + Int4DecodePlan::kBarrierBytes};
  griddep_launch_dependents();
  x.prepare(p);
  const int lane = threadIdx.x % 32;
  const int part = blockIdx.x % kT.parts;
  float* s_sums = reinterpret_cast<float*>(s_memory + plan.x_bytes);
  float2* s_parts = reinterpret_cast<float2*>(s_sums + plan.slots * plan.sum_floats);

  // A block without a tile still brings its neighbour's x.
#pragma unroll 1
  for (int round = 0;; ++round) {
    const Int4DecodeShare share(plan, kT, round);
    const Loader loader(p, lane);
    if (round == 0) {
      // NOTE: of a small share more than half would delay x.
      const int steps = min((share.count + 1) / 2, plan.part_steps - share.in);
      loader.prefetch(p, share.step, min(steps, kT.kAhead), lane);
      x.meet();
      griddep_wait();
      x.start(p, part);
    }
    typename Loader::Slice slices[kT.slices];
    const auto load_first = [&](const Int4DecodeShare& from) {
      if (from.count == 0) return;
#pragma unroll
      for (int i = 0; i < kT.slices; ++i) loader.load(slices[i], p, from.step, i);
    };
    load_first(share);
    const Int4ZeroPlace<T> zero_place(lane);
    uint32_t s_x[Math::kGroups];
#pragma unroll
    for (int g = 0; g < Math::kGroups; ++g) {
      // Tokens that do not exist are the last one again; nobody stores their sums.
      const int token = min(lane % 8 + 8 * g, p.tokens - 1);
      s_x[g] = shared_address(x.s_x) + token * plan.x_row_bytes + lane / 8 * 16;
      asm volatile("" : "+r"(s_x[g]));  // NOTE: else it is computed anew in every step
    }
    if (round == 0) {
      x.wait();
    } else {
      __syncthreads();  // the sums of the round before are read
    }
    const bool special = int4_decode_add<T, kTile, false>(p, share, x, loader, slices, s_x,
                                                          zero_place, s_sums, lane);
    // NOTE: a scale that is inf or NaN leaves sums that are not finite. Then the warp does its
    // share again, with such scales on the codes instead (see Int4RowScales).
    if (__any_sync(~0u, special)) {
      const Int4DecodeShare again(plan, kT, round);
      load_first(again);
      int4_decode_add<T, kTile, true>(p, again, x, loader, slices, s_x, zero_place, s_sums, lane);
    }
    __syncthreads();
    const Int4DecodeRound then(plan, kT.parts, round);
    int4_decode_finish<T, kTile>(p, then, s_sums, s_parts, x.s_barriers, round % 2, part);
    if (then.tiles == then.left) {
      if (then.left == 0) x.wait_all(plan);
      return;
    }
#if TW_HAS_CLUSTERS
    if (kT.parts > 1) {  // nobody sends sums of the next round before these are read
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
  const int64_t blocks = int64_t{params.plan.owners} * kT.parts;
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
