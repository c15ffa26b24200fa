// Thread-block clusters: rank, barrier and distributed shared memory.
#pragma once

#include <cstdint>

#include "device/features.cuh"
#include "device/vec.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Arrives at the cluster barrier without ordering memory accesses.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// rank_in_cluster returns the rank of the CTA in its cluster. cluster_index returns the index of
// the cluster along the first dimension of the grid.
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// Returns the shared::cluster address, in the CTA with rank `rank`, of the variable that is at
// `s_at` in this CTA.
__device__ __forceinline__ uint32_t address_in_block(const void* s_at, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(s_at)), "r"(rank));
  return there;
}

// Loads the pair at `s_from` from the shared memory of the CTA with rank `rank`.
__device__ __forceinline__ float2 load_from_block(const float2* s_from, uint32_t rank) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address_in_block(s_from, rank))
               : "memory");
  return value;
}

__device__ __forceinline__ float4 load_from_block(const float4* s_from, uint32_t rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address_in_block(s_from, rank))
               : "memory");
  return value;
}
#endif

}  // namespace torchweld
