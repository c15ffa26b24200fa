// The epilogue of split K. A block stores its accumulators to shared memory as fp32 [token][row].
// The blocks of a cluster add up the accumulators of all splits, add the bias, round the sums and
// write y.
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"
#include "gemm/epilogue.cuh"
#include "int4/config.h"

namespace torchweld {

// Stores a warp's accumulators of 16 rows in shared memory. A fragment of the accumulators has 8
// tokens. With kAdd, the function adds the accumulators to the values in shared memory.
template <int kRowFloats, bool kAdd = false, int kFragments>
__device__ __forceinline__ void int4_stage_sums(float* s_sums, float (&acc)[kFragments][4],
                                                int tile, int lane) {
  float* s_to = s_sums + lane % 4 * 2 * kRowFloats + lane / 4 + tile * kInt4TileRows;
  const auto place = [](int m, int i) { return (m * 8 + i % 2) * kRowFloats + i / 2 * 8; };
  if constexpr (kAdd) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][i] += s_to[place(m, i)];
    }
  }
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_to[place(m, i)] = acc[m][i];
  }
}

// Loads the bias of rows `row`, `row` + kStride, ..., up to row + count - 1. Later rows get a bias
// of 0. If there is no bias, all rows get 0.
template <typename T, int kStride = 1, int kCount>
__device__ __forceinline__ void int4_load_bias(float (&bias)[kCount], const void* g_bias,
                                               int64_t row, int count) {
#pragma unroll
  for (float& b : bias) b = 0.f;
  if (g_bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i * kStride < count) bias[i] = to_float(static_cast<const T*>(g_bias)[row + i * kStride]);
  }
}

#if TW_HAS_CLUSTERS
// Sets v[i] to the sum of partial i over all splits, in the order of the cluster's ranks. Every
// block stores its 8 partials at the same shared memory address, s_from.
template <int kSplits>
__device__ __forceinline__ void int4_reduce_splits(float (&v)[kGroup], const float4* s_from) {
  float4 partials[kSplits][2];
#pragma unroll
  for (int rank = 0; rank < kSplits; ++rank) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      partials[rank][i] = kSplits == 1 ? s_from[i] : load_from_block(s_from + i, rank);
    }
  }
#pragma unroll
  for (float& sum : v) sum = 0.f;
#pragma unroll
  for (int rank = 0; rank < kSplits; ++rank) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[4 * i] += partials[rank][i].x;
      v[4 * i + 1] += partials[rank][i].y;
      v[4 * i + 2] += partials[rank][i].z;
      v[4 * i + 3] += partials[rank][i].w;
    }
  }
}

// The tile of y that a block writes.
struct Int4Output {
  void* y;
  const void* bias;
  int64_t row_stride;  // row stride of y, in elements
  int64_t rows;        // number of rows of the weight
  int64_t first_row, first_token;
  int tokens;  // number of tokens of the tile that exist in y
};

// Computes y = lift * (the sum of the staged partials of all splits) + bias. Each block of the
// cluster writes one slice of the tile.
template <typename T, int kRows, int kThreads, int kSplits>
__device__ __forceinline__ void int4_reduce_to_y(const Int4Output& out, float lift, int split,
                                                 const float* s_sums, int thread) {
  constexpr int kGroups = kRows / kGroup;
  static_assert(kThreads % kGroups == 0);  // a thread always writes the same columns of y
  const int groups = out.tokens * kGroups, slice = (groups + kSplits - 1) / kSplits;
  const int end = min(groups, (split + 1) * slice);
  int item = split * slice + thread;
  const int column = item % kGroups * kGroup;
  const int64_t row = out.first_row + column;
  const int count = static_cast<int>(min(int64_t{kGroup}, out.rows - row));
  if (count <= 0) return;
  float bias[kGroup];
  int4_load_bias<T>(bias, out.bias, row, count);
#pragma unroll 1
  for (; item < end; item += kThreads) {
    const int token = item / kGroups;
    float v[kGroup];
    int4_reduce_splits<kSplits>(
        v, reinterpret_cast<const float4*>(s_sums + token * (kRows + kInt4SumPadding) + column));
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = v[i] * lift + bias[i];
    store_group(static_cast<T*>(out.y) + (out.first_token + token) * out.row_stride + row, count,
                v);
  }
}
#endif

}  // namespace torchweld
