// Named barriers (bar.sync, bar.arrive) for a subset of the warps of a block. Their numbers are 1
// to 15; number 0 is __syncthreads.
#pragma once

namespace torchweld {

// named_barrier_arrive does not wait. Threads in named_barrier_wait see what the arriving threads
// wrote before. `threads` counts the threads that arrive and those that wait, in whole warps.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// NOTE: a barrier number that is a constant is faster than one in a register.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_wait() {
  asm volatile("bar.sync %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace torchweld
