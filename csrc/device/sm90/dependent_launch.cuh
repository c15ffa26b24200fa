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

// Nothing that another kernel may write is read before this, and nothing is written.
// NOTE: every thread calls it, so that the end of this kernel implies the end of those before it.
__device__ __forceinline__ void griddep_wait() {
#if TW_HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// NOTE: L2 is where all SMs see the same, so a line may be asked for before it is final.
__device__ __forceinline__ void prefetch_line(const void* g_at) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(g_at));
}

}  // namespace torchweld
