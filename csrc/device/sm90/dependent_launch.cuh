// Programmatic dependent launch (PDL): a kernel starts while the previous kernel in the stream
// ends.
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

// Lets the CTAs of the next kernel start as soon as SMs have space for them. The call has an effect
// only if the next kernel was launched with PDL.
__device__ __forceinline__ void griddep_launch_dependents() {
#if TW_HAS_CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all earlier kernels have ended. Before this wait, a thread must not access memory
// that the earlier kernels use.
// NOTE: every thread must call this function. Otherwise this kernel could end before an earlier
// kernel has ended.
__device__ __forceinline__ void griddep_wait() {
#if TW_HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches into L2 the cache line that contains the address g_at.
// NOTE: the prefetch is safe even if another kernel writes the line later, because all SMs share
// L2.
__device__ __forceinline__ void prefetch_line(const void* g_at) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(g_at));
}

}  // namespace torchweld
