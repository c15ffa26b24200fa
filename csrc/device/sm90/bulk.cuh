// Bulk copies from global to shared memory, and the barriers (mbarrier) that count their bytes.
#pragma once

#include "device/sm90/cluster.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// A phase of the barrier ends when `arrivals` threads have arrived and all announced bytes are
// there. Phases alternate between parity 0 and 1.
__device__ __forceinline__ void barrier_init(uint64_t* s_barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(arrivals)
               : "memory");
}

// Shows fresh barriers to the copy engine and to the cluster; a barrier of all threads follows.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(s_barrier))
               : "memory");
}

// Arrives and announces bytes of this phase.
__device__ __forceinline__ void barrier_expect(uint64_t* s_barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(s_barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of that parity. On a fresh barrier parity 1 has ended already.
// NOTE: it acquires for the block, which is enough for bytes that the barrier counted, whoever sent
// them; acquiring for the cluster would empty the L1 cache every time.
__device__ __forceinline__ void barrier_wait(uint64_t* s_barrier, uint32_t parity) {
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

// Addresses and bytes are multiples of 16. The barrier hears of the bytes as they arrive.
__device__ __forceinline__ void bulk_load(void* s_to, const void* g_from, uint32_t bytes,
                                          uint64_t* s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(s_to)), "l"(g_from), "r"(bytes), "r"(shared_address(s_barrier))
      : "memory");
}

// The same to the same place in every block of the cluster whose rank's bit is set, and each one's
// barrier.
__device__ __forceinline__ void bulk_load_to_all(void* s_to, const void* g_from, uint32_t bytes,
                                                 uint64_t* s_barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;"
      :
      : "r"(shared_address(s_to)), "l"(g_from), "r"(bytes), "r"(shared_address(s_barrier)),
        "h"(ranks)
      : "memory");
}

// Orders this thread's stores to shared memory, and its finished asynchronous copies, before bulk
// copies that it issues later and before products of warpgroups behind the next barrier.
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores a pair in the shared memory of the block of that rank, where `s_barrier` hears of it.
__device__ __forceinline__ void send_to_block(float2* s_to, float2 value, uint64_t* s_barrier,
                                              uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               :
               : "r"(address_in_block(s_to, rank)), "f"(value.x), "f"(value.y),
                 "r"(address_in_block(s_barrier, rank))
               : "memory");
}
#endif

}  // namespace torchweld
