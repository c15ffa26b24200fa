// From the sums of warpgroups, those of y^T, to y: the splits of a step and the parts of K in a
// fixed order, bias, rounding.
#pragma once

#include "ops/int4_linear/int4_decode_math.cuh"
#include "ops/int4_linear/int4_deep_loader.cuh"
#include "ops/int4_linear/int4_join.cuh"

namespace torchweld {

// NOTE: bf16 has the exponents to hold lifted weights (see kInt4Lift), fp16 has not.
template <typename T>
inline constexpr bool kInt4DeepLifted = std::is_same_v<T, __nv_bfloat16>;

template <int kTile>
using Int4DeepSums = float[kInt4DeepTiles[kTile].tokens / 2];

#if TW_HAS_CLUSTERS
// A warp's sums to shared memory: [token][row] of fp32; kAdd: with those that are there.
template <int kTile, bool kAdd>
__device__ __forceinline__ void int4_deep_leave(char* s_sums, Int4DeepSums<kTile>& acc, int tile,
                                                int lane) {
  constexpr Int4DeepTile kT = kInt4DeepTiles[kTile];
  constexpr int kStride = kT.sum_row_bytes() / 4;
  float* s_to =
      reinterpret_cast<float*>(s_sums) + lane % 4 * 2 * kStride + lane / 4 + tile * kInt4TileRows;
  const auto place = [](int i) { return (i / 4 * 8 + i % 2) * kStride + i % 4 / 2 * 8; };
  if constexpr (kAdd) {
#pragma unroll
    for (int i = 0; i < kT.tokens / 2; ++i) acc[i] += s_to[place(i)];
  }
#pragma unroll
  for (int i = 0; i < kT.tokens / 2; ++i) s_to[place(i)] = acc[i];
}

// The sums of all parts of the cluster to y. Each block finishes its share.
template <typename T, int kTile, int kParts>
__device__ __forceinline__ void int4_deep_join(const Int4DeepParams& p, const Int4DeepWork& work,
                                               const char* s_sums, int thread) {
  constexpr Int4DeepTile kT = kInt4DeepTiles[kTile];
  constexpr int kPieces = kT.rows / kGroup;
  const int tokens = min(kT.tokens, p.tokens - work.first_token);
  const int all = tokens * kPieces, share = (all + kParts - 1) / kParts;
  const int end = min(all, (work.part + 1) * share);
  for (int at = work.part * share + thread; at < end; at += kT.threads()) {
    const int token = at / kPieces, in = at % kPieces * kGroup;
    const int64_t row = int64_t{work.first_tile} * kInt4TileRows + in;
    const int count = static_cast<int>(min(int64_t{kGroup}, p.rows - row));
    if (count <= 0) continue;
    float v[kGroup];
    int4_join<kParts>(
        v, reinterpret_cast<const float4*>(s_sums + token * kT.sum_row_bytes() + in * 4));
    if constexpr (kInt4DeepLifted<T>) {
#pragma unroll
      for (float& sum : v) sum *= kInt4Lift<T>;
    }
    if (p.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) v[i] += to_float(static_cast<const T*>(p.bias)[row + i]);
      }
    }
    store_group(static_cast<T*>(p.y) + (work.first_token + token) * p.y_row_stride + row, count, v);
  }
}

// The sums of a block's warps, and of its cluster's blocks, to y. The ring is free.
template <typename T, int kTile>
__device__ __forceinline__ void int4_deep_finish(const Int4DeepParams& p, const Int4DeepWork& work,
                                                 char* s_sums, Int4DeepSums<kTile>& acc, int split,
                                                 int tile, int lane) {
  constexpr int kLast = kInt4DeepTiles[kTile].splits() - 1;
  const int thread = threadIdx.x;
  if (split == kLast) int4_deep_leave<kTile, false>(s_sums, acc, tile, lane);
#pragma unroll
  for (int s = kLast - 1; s >= 0; --s) {
    __syncthreads();
    if (split == s) int4_deep_leave<kTile, true>(s_sums, acc, tile, lane);
  }
  if (p.parts == 1) {
    __syncthreads();
    return int4_deep_join<T, kTile, 1>(p, work, s_sums, thread);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (p.parts == 2) int4_deep_join<T, kTile, 2>(p, work, s_sums, thread);
  if (p.parts == 3) int4_deep_join<T, kTile, 3>(p, work, s_sums, thread);
  if (p.parts == 4) int4_deep_join<T, kTile, 4>(p, work, s_sums, thread);
  if (p.parts == 8) int4_deep_join<T, kTile, 8>(p, work, s_sums, thread);
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();  // the neighbours have read this block's sums
}
#endif

}  // namespace torchweld
