// Named barriers (bar.sync, bar.arrive) for a subset of the warps of a block. Barriers 1 to 15 may
// be used; __syncthreads uses barrier 0.
#pragma once

namespace torchweld {

// named_barrier_arrive does not wait. After named_barrier_wait, a thread sees everything that the
// other threads wrote before they arrived. `threads` is the number of arriving threads plus the
// number of waiting threads. It must be a multiple of 32.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// NOTE: bar.sync is faster with a constant barrier number than with a number in a register.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_wait() {
  asm volatile("bar.sync %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace torchweld
