// Barriers of some warps of a block (bar), by numbers 1 to 15; 0 is __syncthreads.
#pragma once

namespace torchweld {

// Whoever arrives doesn't wait, and what it wrote before is seen by those who wait. `threads`
// counts both, in whole warps.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// NOTE: the barrier's number is a constant: one from a register takes longer.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_wait() {
  asm volatile("bar.sync %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace torchweld
