// y = x @ W^T + bias for a repacked 4-bit weight W and at most 16 rows of 16-bit x: the time is
// that of reading the weight once.
//
// A block, or a cluster of blocks that share K, owns some neighbouring tiles of 16 rows of W; each
// warp has its own steps of K. A warp stages its columns of x once, then walks over its steps of
// tile after tile; cp.async brings them, `depth` ahead, into a ring of its own, so that warps meet
// only to add a tile's sums, in a fixed order. A step is of one group: its scale multiplies sums.
//
// Rounding: codes less zeros are exact, sums are fp32 and nothing else is rounded before y.
#pragma once

#include "core/choices.h"
#include "core/launch.h"
#include "device/sm90/cluster.cuh"
#include "ops/int4_linear/int4_decode_loader.cuh"

namespace torchweld {

// Adds bias and rounds. A tile's rows may go beyond the weight's.
template <typename T>
__device__ __forceinline__ void int4_decode_store(const GemmParams& p, int64_t row, int token,
                                                  float sum) {
  if (row >= p.n) return;
  sum *= kInt4Lift<T>;
  if (p.epilogue.bias != nullptr) sum += to_float(static_cast<const T*>(p.epilogue.bias)[row]);
  static_cast<T*>(p.y)[token * p.y_row_stride + row] = from_float<T>(sum);
}

// Adds the sums of a cluster's blocks, of `tiles` tiles; every block finishes some. In the end
// nobody reads s_parts any more, (tile, token, row).
template <typename T, int kTile>
__device__ __forceinline__ void int4_decode_add_parts(const GemmParams& p, const float* s_parts,
                                                      int64_t first_tile, int tiles, int part) {
#if TW_HAS_CLUSTERS
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  cluster_arrive();
  cluster_wait();
  const int outputs = static_cast<int>(p.m) * kInt4TileRows;
  constexpr int kAtOnce = 2 * kT.threads();
  for (int i = 2 * threadIdx.x + part * kAtOnce; i < tiles * outputs; i += kAtOnce * kT.parts) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int rank = 0; rank < kT.parts; ++rank) {
      const float2 one = load_from_block(reinterpret_cast<const float2*>(s_parts + i), rank);
      sum.x += one.x;
      sum.y += one.y;
    }
    const int64_t row = (first_tile + i / outputs) * kInt4TileRows + i % kInt4TileRows;
    const int token = i % outputs / kInt4TileRows;
    int4_decode_store<T>(p, row, token, sum.x);
    int4_decode_store<T>(p, row + 1, token, sum.y);
  }
  cluster_arrive();
  cluster_wait();
#endif
}

template <typename T, int kTile>
__global__ void __launch_bounds__(kInt4DecodeTiles[kTile].threads(), 1)
    int4_decode_kernel(const __grid_constant__ Int4LinearParams p,
                       const __grid_constant__ Int4DecodePlan plan) {
  using Math = Int4DecodeMath<T, kTile>;
  using Loader = Int4DecodeLoader<kTile>;
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kXStep = kT.chunks * kInt4ChunkK * sizeof(T);
  constexpr int kRings = kT.warps * kT.ring_bytes();
  extern __shared__ __align__(128) char s_memory[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int owner = blockIdx.x / kT.parts, part = blockIdx.x % kT.parts;
  const int tiles = plan.base_tiles + (owner < plan.more_tiles);
  const int first_tile = owner * plan.base_tiles + min(owner, plan.more_tiles);
  const Int4DecodeSteps steps(plan, kT, part, warp);
  const int tokens = static_cast<int>(p.gemm.m);

  // x is in the first group of copies; every further group is a step.
  const uint32_t s_base = shared_address(s_memory), s_ring = s_base + warp * kT.ring_bytes();
  Loader loader(p.weight, plan, steps, first_tile, lane);
  int left = tiles * steps.count();  // steps to load
  const auto load_next = [&](uint32_t s_slot) {
    if (left > 0) loader.load(s_slot, plan);
    --left;
  };
  load_next(s_ring);
  uint32_t s_x[Math::kGroups];
  {
    const uint32_t s_warp = s_base + kRings + warp * tokens * plan.x_row_bytes;
    int4_stage_x<T, kTile>(s_warp, p.gemm, plan, steps, lane);
#pragma unroll
    for (int g = 0; g < Math::kGroups; ++g) {
      // Tokens that do not exist are the last one again; nobody stores their sums.
      const int token = min(lane % 8 + 8 * g, tokens - 1);
      s_x[g] = s_warp + token * plan.x_row_bytes + lane / 8 * 16;
      asm volatile("" : "+r"(s_x[g]));  // NOTE: else it is computed anew in every step
    }
  }
  copy_async_commit();
#pragma unroll
  for (int i = 1; i < kT.depth - 1; ++i) {
    load_next(s_ring + i * kT.slot_bytes());
    copy_async_commit();
  }

  const Int4ZeroPlace<T> zero_place(lane);
  float* s_sums = reinterpret_cast<float*>(s_memory + kRings + plan.x_bytes);
  float* s_parts = s_sums + 2 * kT.warps * plan.sum_floats;
  float* s_own = s_sums + warp * plan.sum_floats + Math::place(lane % 4 * 2, lane / 4);
  int other_half = kT.warps * plan.sum_floats;
  const int outputs = tokens * kInt4TileRows;
  uint32_t turn = threadIdx.x;
  uint32_t s_now = s_ring, s_free = s_ring + (kT.depth - 1) * kT.slot_bytes();
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    typename Math::Sums acc = {};
    int at = 0;
#pragma unroll 1
    for (int i = steps.count(); i > 0; --i) {
      copy_async_wait<kT.depth - 2>();
      __syncwarp();  // the step is there, and every lane has left the one before
      load_next(s_free);
      copy_async_commit();
      Math::template add<false>(acc, loader.read(s_now), zero_place, s_x, at);
      at += kXStep;
      s_free = s_now;
      s_now += kT.slot_bytes();
      if (s_now == s_ring + kT.ring_bytes()) s_now = s_ring;
    }
    // NOTE: a scale that is inf or NaN leaves sums that are not finite. Then the warp does the tile
    // again, with such scales on the codes instead (see Int4RowScales).
    if (Math::any_special(acc)) {
#pragma unroll
      for (auto& group : acc) {
        for (float& sum : group) sum = 0.f;
      }
#pragma unroll 1
      for (int i = 0; i < steps.count(); ++i) {
        const auto step = Loader::read(p.weight, plan, first_tile + t, steps.begin + i, lane);
        Math::template add<true>(acc, step, zero_place, s_x, i * kXStep);
      }
    }
    Math::store(s_own, acc, tokens, lane);
    __syncthreads();
    // Another few warps in every tile add its sums.
    const int n = turn % kT.threads();
    turn += kT.threads() - outputs;
    if (n < outputs) {
      const int row = n % kInt4TileRows, token = n / kInt4TileRows;
      const float* s_from = s_sums + Math::place(token, row);
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kT.warps; ++w) sum += s_from[w * plan.sum_floats];
      if constexpr (kT.parts == 1) {
        int4_decode_store<T>(p.gemm, int64_t{first_tile + t} * kInt4TileRows + row, token, sum);
      } else {
        s_parts[t % kT.kClusterTiles * outputs + n] = sum;
      }
    }
    // The other half: nobody writes this one before all have passed the next barrier.
    s_sums += other_half;
    s_own += other_half;
    other_half = -other_half;
    if constexpr (kT.parts > 1) {
      const int gathered = t % kT.kClusterTiles + 1;
      if (gathered == kT.kClusterTiles || t == tiles - 1) {
        int4_decode_add_parts<T, kTile>(p.gemm, s_parts, first_tile + t + 1 - gathered, gathered,
                                        part);
      }
    }
  }
}

template <typename T, int kTile>
void launch_int4_decode_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  const auto kernel = int4_decode_kernel<T, kTile>;
  const Int4DecodePlan plan(kT, p.gemm.m, p.weight.shape, p.sms);
  allow_shared_memory(kernel, plan.shared_bytes);
  note_kernel(kernel, kT.threads(), plan.shared_bytes);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kT.parts), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.owners * kT.parts);
  config.blockDim = dim3(kT.threads());
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kT.parts > 1 ? 1 : 0;
  // A failure stays behind for check_launch.
  (void)cudaLaunchKernelEx(&config, kernel, p, plan);
}

// The tile that the host has chosen.
template <typename T, int kTile = 0>
void launch_int4_decode_of(const Int4LinearParams& p, cudaStream_t stream) {
  if constexpr (kTile < kInt4DecodeTileCount) {
    if (p.choice.tile != kInt4TileCount + kTile) {
      return launch_int4_decode_of<T, kTile + 1>(p, stream);
    }
    launch_int4_decode_kernel<T, kTile>(p, stream);
  }
}

}  // namespace torchweld
