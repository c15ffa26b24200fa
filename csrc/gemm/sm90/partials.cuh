// Sums on their way between blocks that have some of a tile's k_blocks each: to the block that
// finishes it, through memory, or within a cluster, of which every block finishes some columns.
#pragma once

#include "device/block_flags.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

// A warpgroup's partial sums of a tile in the workspace. A CTA stores at most one partial.
struct Sm90Partials {
  static constexpr int kThreads = 128;

  float* sums;
  BlockFlags flags;

  // `barrier` is the warpgroup's named barrier.
  template <int kValues>
  __device__ __forceinline__ void store_partial(const float (&v)[kValues], int64_t slot, int thread,
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

  // Waits for the partial of another CTA and adds it to v.
  template <int kValues>
  __device__ __forceinline__ void accumulate_partial(float (&v)[kValues], int64_t slot, int thread,
                                                     int barrier) const {
    if (thread == 0) flags.wait(slot);
    named_barrier_wait(barrier, kThreads);
    const float4* g_from =
        reinterpret_cast<const float4*>(sums + slot * kValues * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      const float4 partial = __ldcg(g_from + i * kThreads);
      v[4 * i] += partial.x;
      v[4 * i + 1] += partial.y;
      v[4 * i + 2] += partial.z;
      v[4 * i + 3] += partial.w;
    }
  }
};

#if TW_HAS_CLUSTERS
// What a thread of a cluster's block finishes of its values: [first, first + count).
struct Sm90OutputSlice {
  int first, count;
};

// Adds up the share of each block of a cluster, in the order of K. g_sums: what kThreads threads of
// each block of the grid have. By all of them and, for the cluster's barrier, by the block's other
// warps elsewhere.
// NOTE: not through the neighbours' shared memory. So a product of 64 x 4096 x 4096 took 3 us more
// on an H200.
template <int kSplitCluster, int kThreads, int kValues>
__device__ __forceinline__ Sm90OutputSlice sm90_cluster_reduce(float (&v)[kValues], float* g_sums,
                                                               int thread) {
  constexpr int kAll = kValues / 4, kShare = (kAll + kSplitCluster - 1) / kSplitCluster;
  const int rank = static_cast<int>(rank_in_cluster()), first = rank * kShare;
  float4* const g_cluster =
      reinterpret_cast<float4*>(g_sums) + int64_t{blockIdx.x - rank} * (kAll * kThreads) + thread;
  const auto at = [&](int block, int i) { return g_cluster + (block * kAll + i) * kThreads; };
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    if (i / kShare == rank) continue;
    __stcg(at(rank, i), make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
  }
  cluster_arrive();
  cluster_wait();
  float4 part[kSplitCluster][kShare];
#pragma unroll
  for (int block = 0; block < kSplitCluster; ++block) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      part[block][i] = block != rank && first + i < kAll ? __ldcg(at(block, first + i)) : float4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    if (i / kShare != rank) continue;
    float* const own = v + 4 * i;
    float4 sum = {};
#pragma unroll
    for (int block = 0; block < kSplitCluster; ++block) {
      const float4& other = part[block][i % kShare];
      sum.x += block == rank ? own[0] : other.x;
      sum.y += block == rank ? own[1] : other.y;
      sum.z += block == rank ? own[2] : other.z;
      sum.w += block == rank ? own[3] : other.w;
    }
    own[0] = sum.x;
    own[1] = sum.y;
    own[2] = sum.z;
    own[3] = sum.w;
  }
  return {4 * first, 4 * kShare};
}
#endif

}  // namespace torchweld
