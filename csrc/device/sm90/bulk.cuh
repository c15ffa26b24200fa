// Bulk copies of contiguous bytes between global and shared memory (cp.async.bulk), and bulk
// additions of fp32 values to global memory (cp.reduce.async.bulk).
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Addresses and bytes are multiples of 16. The barrier counts the bytes that arrive.
__device__ __forceinline__ void bulk_load(void* s_to, const void* g_from, uint32_t bytes,
                                          uint64_t* s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(s_to)), "l"(g_from), "r"(bytes), "r"(shared_address(s_barrier))
      : "memory");
}

// Multicast: copies to this offset in every CTA of the cluster whose rank's bit is set. Each one's
// barrier counts the bytes that arrive.
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

// Addresses and bytes are multiples of 16. Earlier stores to the source need an async_fence. Copies
// and additions belong to this thread's next tma_commit.
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

// Orders this thread's accesses of global memory before those of its later bulk copies, and those
// of its finished bulk copies before its own.
__device__ __forceinline__ void global_async_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Copies this CTA's shared memory to that of the CTA with that rank, whose `s_barrier` counts the
// bytes. Earlier stores to the source need an async_fence.
__device__ __forceinline__ void bulk_send_to_block(void* s_to, const void* s_from, uint32_t bytes,
                                                   uint64_t* s_barrier, uint32_t rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(address_in_block(s_to, rank)), "r"(shared_address(s_from)), "r"(bytes),
        "r"(address_in_block(s_barrier, rank))
      : "memory");
}

// Stores a pair in the shared memory of the CTA with that rank, whose `s_barrier` counts the bytes.
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
