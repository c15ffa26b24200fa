// Named barriers of some warps of a block (bar), with numbers 1 to 15; 0 is __syncthreads.
#pragma once

namespace torchweld {

// A thread that arrives does not wait. Threads that wait see what it wrote before. `threads` counts
// both kinds, in whole warps.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// NOTE: the barrier's number is a constant, which is faster than one in a register.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_wait() {
  asm volatile("bar.sync %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace torchweld
