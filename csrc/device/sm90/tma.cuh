// Copies boxes of a tensor between global and shared memory by TMA (tensor maps). Coordinates count
// elements, the contiguous dimension first. A load fills elements outside of the tensor with zeros,
// which the barrier counts; a store skips them. Source: PTX ISA, "Data Movement and Conversion
// Instructions: Tensor copy".
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tensor_map.h"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Returns true in one lane of the warp and false in the others.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads a box. The barrier counts the bytes that arrive.
__device__ __forceinline__ void tma_load(uint32_t s_to, const TensorMap& map, uint64_t* s_barrier,
                                         int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(s_to), "l"(&map), "r"(shared_address(s_barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Multicast: copies the box to the address s_to in every CTA of the cluster whose bit is set in
// `ranks`. The barrier of each such CTA counts the bytes that arrive there.
__device__ __forceinline__ void tma_load_multicast(uint32_t s_to, const TensorMap& map,
                                                   uint64_t* s_barrier, int x, int y, int z, int w,
                                                   uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :
      : "r"(s_to), "l"(&map), "r"(shared_address(s_barrier)), "r"(x), "r"(y), "r"(z), "r"(w),
        "h"(ranks)
      : "memory");
}

// Stores a box. An async_fence must separate earlier stores to its shared memory from this call.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t s_from, int x, int y,
                                          int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      :
      : "l"(&map), "r"(s_from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending committed stores of this thread have read their shared
// memory.
template <int kPending>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all committed stores of this thread are complete.
__device__ __forceinline__ void tma_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

}  // namespace torchweld
