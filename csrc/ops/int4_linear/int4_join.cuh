// 8 sums of a token, of all parts of K in a cluster.
#pragma once

#include "device/sm90/cluster.cuh"
#include "gemm/epilogue.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Added in the order of the ranks. `s_from` is their place in every block; one part is this block.
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
#endif

}  // namespace torchweld
