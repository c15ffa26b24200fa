// A kernel that begins while the one before it in the stream ends (programmatic dependent launch).
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

// Lets the next kernel's CTAs start, where SMs have space and its launch allows it.
__device__ __forceinline__ void griddep_launch_dependents() {
#if TW_HAS_CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the kernels before. No thread accesses memory that they use before it.
// NOTE: every thread calls it, so that the end of this kernel implies the end of those before it.
__device__ __forceinline__ void griddep_wait() {
#if TW_HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches the cache line of an address into L2.
// NOTE: all SMs share L2, so a line may be prefetched before another kernel writes it.
__device__ __forceinline__ void prefetch_line(const void* g_at) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(g_at));
}

}  // namespace torchweld
