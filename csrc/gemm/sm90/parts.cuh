// Sums on their way between blocks that have some of a tile's steps each: to the block that
// finishes it, through memory, or within a cluster, of which every block finishes some columns.
#pragma once

#include "device/block_flags.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

// A warpgroup's sums of one piece in the workspace. A block has at most one piece to hand on.
struct Sm90Parts {
  static constexpr int kThreads = 128;

  float* sums;
  BlockFlags flags;

  // Own barrier of the warpgroup: `barrier`.
  template <int kValues>
  __device__ __forceinline__ void send(const float (&v)[kValues], int64_t slot, int thread,
                                       int barrier) const {
    float4* g_to = reinterpret_cast<float4*>(sums + slot * kValues * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      g_to[i * kThreads] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    named_barrier_wait(barrier, kThreads);
    if (thread == 0) {
      __threadfence();
      flags.raise(slot);
    }
  }

  // Adds what another block has sent, once it is there.
  template <int kValues>
  __device__ __forceinline__ void add(float (&v)[kValues], int64_t slot, int thread,
                                      int barrier) const {
    if (thread == 0) flags.wait(slot);
    named_barrier_wait(barrier, kThreads);
    const float4* g_from =
        reinterpret_cast<const float4*>(sums + slot * kValues * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      const float4 part = __ldcg(g_from + i * kThreads);
      v[4 * i] += part.x;
      v[4 * i + 1] += part.y;
      v[4 * i + 2] += part.z;
      v[4 * i + 3] += part.w;
    }
  }
};

#if TW_HAS_CLUSTERS
// What a thread of a cluster's block finishes of its values: [first, first + count).
struct Sm90Share {
  int first, count;
};

// Adds up the share of each block of a cluster, in the order of K. s_sums: what kThreads threads
// have. By all of them and, for the cluster's barrier, by the block's other warps elsewhere. Nobody
// leaves before the cluster's next barrier: others read what is here.
template <int kJoined, int kThreads, int kValues>
__device__ __forceinline__ Sm90Share sm90_join(float (&v)[kValues], float4* s_sums, int thread) {
  constexpr int kAll = kValues / 4, kShare = kAll / kJoined;
  static_assert(kShare * kJoined == kAll);
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    s_sums[i * kThreads + thread] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  cluster_arrive();
  cluster_wait();
  const int first = static_cast<int>(rank_in_cluster()) * kShare;
  float4 part[kJoined][kShare];
#pragma unroll
  for (int rank = 0; rank < kJoined; ++rank) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      part[rank][i] = load_from_block(s_sums + (first + i) * kThreads + thread, rank);
    }
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    float4 sum = part[0][i];
#pragma unroll
    for (int rank = 1; rank < kJoined; ++rank) {
      sum.x += part[rank][i].x;
      sum.y += part[rank][i].y;
      sum.z += part[rank][i].z;
      sum.w += part[rank][i].w;
    }
#pragma unroll
    for (int to = i; to < kAll; to += kShare) {
      if (to - i != first) continue;
      v[4 * to] = sum.x;
      v[4 * to + 1] = sum.y;
      v[4 * to + 2] = sum.z;
      v[4 * to + 3] = sum.w;
    }
  }
  return {4 * first, 4 * kShare};
}
#endif

}  // namespace torchweld
