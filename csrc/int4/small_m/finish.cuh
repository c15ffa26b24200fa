// The epilogue of the small-M kernel. The accumulators hold y^T. The epilogue first adds up the
// accumulators of a block's warps, and then the partials of the splits of K. Both sums have a fixed
// order. Then it adds the bias and rounds.
#pragma once

#include "device/features.cuh"
#include "int4/decode/math.cuh"
#include "int4/small_m/loader.cuh"
#include "int4/sums.cuh"

namespace torchweld {

// Whether the kernel unpacks the weight to lifted values (see kInt4Lift).
// NOTE: the exponent range of bf16 includes lifted weights. The exponent range of fp16 does not
// include them.
template <typename T>
inline constexpr bool kInt4SmallMLifted = std::is_same_v<T, __nv_bfloat16>;

template <int kTile>
using Int4SmallMSums = float[kInt4SmallMTiles[kTile].tokens / 2];

#if TW_HAS_CLUSTERS
// Reduces the accumulators of the block's warps and of the cluster's blocks, and writes y. The
// function overwrites the ring in shared memory.
template <typename T, int kTile>
__device__ __forceinline__ void int4_small_m_finish(const Int4SmallMParams& p,
                                                    const Int4SmallMWorkTile& work, char* s_memory,
                                                    Int4SmallMSums<kTile>& acc, int warp_split,
                                                    int tile, int lane) {
  constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  constexpr int kLast = kT.warp_splits() - 1, kRowFloats = kT.sum_row_floats();
  const int thread = threadIdx.x;
  float* s_sums = reinterpret_cast<float*>(s_memory);
  auto& sums = reinterpret_cast<float (&)[kT.tokens / 8][4]>(acc);
  if (warp_split == kLast) int4_stage_sums<kRowFloats>(s_sums, sums, tile, lane);
#pragma unroll
  for (int s = kLast - 1; s >= 0; --s) {
    __syncthreads();
    if (warp_split == s) int4_stage_sums<kRowFloats, true>(s_sums, sums, tile, lane);
  }
  const int64_t first_row = int64_t{work.first_tile} * kInt4TileRows;
  const Int4Output out = {p.y,
                          p.bias,
                          p.y_row_stride,
                          p.rows,
                          first_row,
                          work.first_token,
                          min(kT.tokens, p.tokens - work.first_token)};
  const auto reduce = [&](auto splits) {
    constexpr float kLift = kInt4SmallMLifted<T> ? kInt4Lift<T> : 1.f;
    int4_reduce_to_y<T, kT.rows, kT.threads(), splits.value>(out, kLift, work.split, s_sums,
                                                             thread);
  };
  if (p.splits == 1) {
    __syncthreads();
    return reduce(std::integral_constant<int, 1>());
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (p.splits == 2) reduce(std::integral_constant<int, 2>());
  if (p.splits == 3) reduce(std::integral_constant<int, 3>());
  if (p.splits == 4) reduce(std::integral_constant<int, 4>());
  if (p.splits == 8) reduce(std::integral_constant<int, 8>());
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();  // wait until the other blocks have read the partials of this block
}
#endif

}  // namespace torchweld
