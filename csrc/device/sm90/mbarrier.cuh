// Barriers in shared memory that count arrivals and bytes (mbarrier).
// Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// A phase of the barrier ends when `arrivals` threads and all expected bytes have arrived. Phases
// alternate between parity 0 and 1.
__device__ __forceinline__ void mbarrier_init(uint64_t* s_barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to TMA and to the cluster; a barrier of all threads follows.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(s_barrier))
               : "memory");
}

// Arrives and expects this many more bytes in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* s_barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of that parity. On a fresh barrier parity 1 has ended already.
// NOTE: it acquires at CTA scope, which suffices for all bytes that the barrier counted. Acquiring
// at cluster scope would empty the L1 cache every time.
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

// Arrives at the same barrier of the CTA with that rank in the cluster.
// NOTE: it releases at CTA scope. A release at cluster scope would wait for all of this thread's
// memory accesses, which was a third of a product's time.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* s_barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
               :
               : "r"(address_in_block(s_barrier, rank))
               : "memory");
}

// Orders this thread's stores to shared memory, and its finished asynchronous copies, before bulk
// copies that it issues later and before wgmmas behind the next barrier.
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace torchweld
