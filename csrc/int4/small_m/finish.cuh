// From the sums of warpgroups, those of y^T, to y: the splits of a step and the parts of K in a
// fixed order, bias, rounding.
#pragma once

#include "device/features.cuh"
#include "int4/decode/math.cuh"
#include "int4/small_m/loader.cuh"
#include "int4/sums.cuh"

namespace torchweld {

// NOTE: bf16 has the exponents to hold lifted weights (see kInt4Lift), fp16 has not.
template <typename T>
inline constexpr bool kInt4SmallMLifted = std::is_same_v<T, __nv_bfloat16>;

template <int kTile>
using Int4SmallMSums = float[kInt4SmallMTiles[kTile].tokens / 2];

#if TW_HAS_CLUSTERS
// The sums of a block's warps, and of its cluster's blocks, to y. The ring is free.
template <typename T, int kTile>
__device__ __forceinline__ void int4_small_m_finish(const Int4SmallMParams& p,
                                                    const Int4SmallMWorkTile& work, char* s_memory,
                                                    Int4SmallMSums<kTile>& acc, int split, int tile,
                                                    int lane) {
  constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  constexpr int kLast = kT.splits() - 1, kRowFloats = kT.sum_row_floats();
  const int thread = threadIdx.x;
  float* s_sums = reinterpret_cast<float*>(s_memory);
  auto& sums = reinterpret_cast<float (&)[kT.tokens / 8][4]>(acc);
  if (split == kLast) int4_stage_sums<kRowFloats>(s_sums, sums, tile, lane);
#pragma unroll
  for (int s = kLast - 1; s >= 0; --s) {
    __syncthreads();
    if (split == s) int4_stage_sums<kRowFloats, true>(s_sums, sums, tile, lane);
  }
  const int64_t first_row = int64_t{work.first_tile} * kInt4TileRows;
  const Int4Output out = {p.y,
                          p.bias,
                          p.y_row_stride,
                          p.rows,
                          first_row,
                          work.first_token,
                          min(kT.tokens, p.tokens - work.first_token)};
  const auto join = [&](auto parts) {
    constexpr float kLift = kInt4SmallMLifted<T> ? kInt4Lift<T> : 1.f;
    int4_join_to_y<T, kT.rows, kT.threads(), parts.value>(out, kLift, work.part, s_sums, thread);
  };
  if (p.parts == 1) {
    __syncthreads();
    return join(std::integral_constant<int, 1>());
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (p.parts == 2) join(std::integral_constant<int, 2>());
  if (p.parts == 3) join(std::integral_constant<int, 3>());
  if (p.parts == 4) join(std::integral_constant<int, 4>());
  if (p.parts == 8) join(std::integral_constant<int, 8>());
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();  // the neighbours have read this block's sums
}
#endif

}  // namespace torchweld
