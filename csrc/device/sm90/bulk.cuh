// Bulk copies of contiguous bytes between global and shared memory (cp.async.bulk), and bulk
// additions of fp32 values from shared to global memory (cp.reduce.async.bulk).
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Copies `bytes` bytes from global to shared memory. Both addresses and `bytes` must be multiples
// of 16. s_barrier counts the bytes that arrive.
__device__ __forceinline__ void bulk_load(void* s_to, const void* g_from, uint32_t bytes,
                                          uint64_t* s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(s_to)), "l"(g_from), "r"(bytes), "r"(shared_address(s_barrier))
      : "memory");
}

// Copies `bytes` bytes from global memory to the shared memory of several CTAs of the cluster
// (multicast). A CTA receives a copy at s_to if the bit of its rank is set in `ranks`. s_barrier of
// each such CTA counts the bytes that arrive in that CTA.
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

// bulk_store copies fp32 values from shared to global memory. bulk_add adds fp32 values in shared
// memory to the values in global memory. Both addresses and `bytes` must be multiples of 16. There
// must be an async_fence between earlier stores to s_from and the call. The next tma_commit of this
// thread commits the copy or the addition.
__device__ __forceinline__ void bulk_store(float* g_to, const float* s_from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(g_to), "r"(shared_address(s_from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_add(float* g_to, const float* s_from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(g_to), "r"(shared_address(s_from)), "r"(bytes)
               : "memory");
}

// Orders this thread's earlier accesses to global memory before its later bulk copies. Also orders
// its finished bulk copies before its later accesses to global memory.
__device__ __forceinline__ void global_async_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Copies shared memory of this CTA to the shared memory of the CTA with rank `rank`. s_barrier of
// the receiving CTA counts the bytes that arrive. There must be an async_fence between earlier
// stores to s_from and this call.
__device__ __forceinline__ void bulk_send_to_block(void* s_to, const void* s_from, uint32_t bytes,
                                                   uint64_t* s_barrier, uint32_t rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(address_in_block(s_to, rank)), "r"(shared_address(s_from)), "r"(bytes),
        "r"(address_in_block(s_barrier, rank))
      : "memory");
}

// Stores a pair of floats in the shared memory of the CTA with rank `rank`. s_barrier of the
// receiving CTA counts the bytes that arrive.
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
