// Bulk copies of adjacent bytes from global to shared memory (cp.async.bulk).
#pragma once

#include "device/sm90/mbarrier.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
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
