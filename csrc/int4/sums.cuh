// A block's sums on their way to y: through shared memory, as [token][row] of fp32, and from there
// with those of all parts of K in a cluster, bias and rounding.
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"
#include "gemm/epilogue.cuh"
#include "int4/config.h"

namespace torchweld {

// A warp's sums of a tile of 16 rows, in fragments of 8 tokens, to their place. kAdd: with those
// that are there.
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

// The bias of rows of the weight, kStep apart, of which `count` from the first one on are there; 0
// where there is none.
template <typename T, int kStep = 1, int kCount>
__device__ __forceinline__ void int4_load_bias(float (&bias)[kCount], const void* g_bias,
                                               int64_t row, int count) {
#pragma unroll
  for (float& b : bias) b = 0.f;
  if (g_bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i * kStep < count) bias[i] = to_float(static_cast<const T*>(g_bias)[row + i * kStep]);
  }
}

#if TW_HAS_CLUSTERS
// 8 sums of all parts, added in the order of the cluster's ranks. `s_from` is their place in every
// block; one part is this block.
template <int kParts>
__device__ __forceinline__ void int4_join(float (&v)[kGroup], const float4* s_from) {
  float4 parts[kParts][2];
#pragma unroll
  for (int rank = 0; rank < kParts; ++rank) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      parts[rank][i] = kParts == 1 ? s_from[i] : load_from_block(s_from + i, rank);
    }
  }
#pragma unroll
  for (float& sum : v) sum = 0.f;
#pragma unroll
  for (int rank = 0; rank < kParts; ++rank) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[4 * i] += parts[rank][i].x;
      v[4 * i + 1] += parts[rank][i].y;
      v[4 * i + 2] += parts[rank][i].z;
      v[4 * i + 3] += parts[rank][i].w;
    }
  }
}

// Where a block's tile of y lies in it.
struct Int4Output {
  void* y;
  const void* bias;
  int64_t row_stride;  // of y
  int64_t rows;        // of the weight
  int64_t first_row, first_token;
  int tokens;  // of the tile, that there are
};

// The staged sums of all parts, times `lift`, to y. Each block of the cluster finishes its share.
template <typename T, int kRows, int kThreads, int kParts>
__device__ __forceinline__ void int4_join_to_y(const Int4Output& out, float lift, int part,
                                               const float* s_sums, int thread) {
  constexpr int kPieces = kRows / kGroup;
  static_assert(kThreads % kPieces == 0);  // a thread's columns of y are always the same
  const int all = out.tokens * kPieces, share = (all + kParts - 1) / kParts;
  const int end = min(all, (part + 1) * share);
  int at = part * share + thread;
  const int in = at % kPieces * kGroup;
  const int64_t row = out.first_row + in;
  const int count = static_cast<int>(min(int64_t{kGroup}, out.rows - row));
  if (count <= 0) return;
  float bias[kGroup];
  int4_load_bias<T>(bias, out.bias, row, count);
#pragma unroll 1
  for (; at < end; at += kThreads) {
    const int token = at / kPieces;
    float v[kGroup];
    int4_join<kParts>(
        v, reinterpret_cast<const float4*>(s_sums + token * (kRows + kInt4SumPadding) + in));
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = v[i] * lift + bias[i];
    store_group(static_cast<T*>(out.y) + (out.first_token + token) * out.row_stride + row, count,
                v);
  }
}
#endif

}  // namespace torchweld
