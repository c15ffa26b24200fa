// Barriers in shared memory that count arrivals and bytes (mbarrier).
// Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Initialises a barrier. A phase of the barrier ends when `arrivals` threads have arrived and all
// expected bytes have arrived. The parity of the first phase is 0, the parity of the second phase
// is 1, and later phases alternate between 0 and 1.
__device__ __forceinline__ void mbarrier_init(uint64_t* s_barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to TMA and to the other CTAs of the cluster. All threads must
// synchronise after this call.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(s_barrier))
               : "memory");
}

// Arrives at the barrier in the name of `threads` threads.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier, uint32_t threads) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(threads)
               : "memory");
}

// Arrives at the barrier and adds `bytes` to the number of bytes that the current phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* s_barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the barrier when all cp.async copies that this thread has started are complete. The
// barrier must count the arrival of each thread that calls this function.
__device__ __forceinline__ void copy_async_arrive(uint64_t* s_barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               :
               : "r"(shared_address(s_barrier))
               : "memory");
}

// Waits until the phase with parity `parity` has ended. On a newly initialised barrier, a wait for
// parity 1 returns at once.
// NOTE: the wait has acquire semantics at CTA scope. CTA scope is enough to see all bytes that the
// barrier counted. At cluster scope every wait would invalidate the L1 cache.
__device__ __forceinline__ void mbarrier_wait(uint64_t* s_barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(s_barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Arrives at the barrier `s_barrier` of the CTA with rank `rank` in the cluster.
// NOTE: the arrival has release semantics at CTA scope. At cluster scope the arrival would wait for
// all memory accesses of this thread. Such waits took a third of the time of a matmul.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* s_barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
               :
               : "r"(address_in_block(s_barrier, rank))
               : "memory");
}

// Orders this thread's earlier accesses to shared memory (stores and finished asynchronous copies)
// before its later bulk copies. If the thread then passes a barrier, the accesses are also ordered
// before the wgmmas that other threads issue after that barrier.
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace torchweld
