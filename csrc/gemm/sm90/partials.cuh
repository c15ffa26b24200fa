// Adds up the partial sums of CTAs that split the K of a tile. In stream-K a CTA stores its partial
// sums in the workspace. The CTA that runs the epilogue of the tile adds them to its own sums. If a
// cluster splits the K of a tile, its CTAs exchange their partial sums, and each CTA computes the
// final sums of one slice of the output.
#pragma once

#include "device/block_flags.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld::sm90 {

// The workspace for the partial sums of stream-K. A warpgroup stores the partial sums of at most
// one tile.
struct Partials {
  static constexpr int kThreads = 128;

  float* sums;
  BlockFlags flags;

  // Stores v in `slot` and sets the ready flag of the slot. `barrier` is a named barrier for the
  // threads of the warpgroup.
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

  // Waits for the partial that another CTA stores in `slot` and adds it to v.
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
// The part of a tile for which this CTA of the cluster computes and stores the final sums. The part
// consists of the values first to first + count - 1 of every thread.
struct OutputSlice {
  int first, count;
};

// Sums v over the CTAs of a cluster, in the order of their ranges of K. Returns the output slice of
// this CTA. Afterwards only the values of that slice in v are final sums. g_sums is a workspace
// with kThreads * kValues floats for each CTA of the grid. kThreads threads of the CTA must call
// this function. The CTA's other warps must meanwhile arrive at the cluster barrier and wait for
// it.
// NOTE: the partial sums go through global memory. With distributed shared memory instead, the
// product (M, K, N) = (64, 4096, 4096) took 3 us longer on an H200.
template <int kSplitCluster, int kThreads, int kValues>
__device__ __forceinline__ OutputSlice cluster_reduce(float (&v)[kValues], float* g_sums,
                                                      int thread) {
  constexpr int kAll = kValues / 4, kSlice = (kAll + kSplitCluster - 1) / kSplitCluster;
  const int rank = static_cast<int>(rank_in_cluster()), first = rank * kSlice;
  float4* const g_cluster =
      reinterpret_cast<float4*>(g_sums) + int64_t{blockIdx.x - rank} * (kAll * kThreads) + thread;
  const auto g_values = [&](int cta, int i) { return g_cluster + (cta * kAll + i) * kThreads; };
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    if (i / kSlice == rank) continue;
    __stcg(g_values(rank, i), make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
  }
  cluster_arrive();
  cluster_wait();
  float4 partials[kSplitCluster][kSlice];
#pragma unroll
  for (int cta = 0; cta < kSplitCluster; ++cta) {
#pragma unroll
    for (int i = 0; i < kSlice; ++i) {
      partials[cta][i] =
          cta != rank && first + i < kAll ? __ldcg(g_values(cta, first + i)) : float4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    if (i / kSlice != rank) continue;
    float* const own = v + 4 * i;
    float4 sum = {};
#pragma unroll
    for (int cta = 0; cta < kSplitCluster; ++cta) {
      const float4& other = partials[cta][i % kSlice];
      sum.x += cta == rank ? own[0] : other.x;
      sum.y += cta == rank ? own[1] : other.y;
      sum.z += cta == rank ? own[2] : other.z;
      sum.w += cta == rank ? own[3] : other.w;
    }
    own[0] = sum.x;
    own[1] = sum.y;
    own[2] = sum.z;
    own[3] = sum.w;
  }
  return {4 * first, 4 * kSlice};
}
#endif

}  // namespace torchweld::sm90
