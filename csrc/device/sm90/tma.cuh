// Copies boxes of a tensor between global and shared memory by TMA (tensor maps). Coordinates are
// in elements. The coordinate x of the contiguous dimension comes first. A box may extend beyond
// the tensor. A load writes zeros for the elements of the box outside of the tensor, and the
// barrier counts the bytes of these zeros too. A store skips the elements outside of the tensor.
// Source: PTX ISA, "Data Movement and Conversion Instructions: Tensor copy".
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tensor_map.h"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Returns true in one lane of the warp and false in the other lanes.
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

// Loads a box from global to shared memory. s_barrier counts the bytes that arrive.
__device__ __forceinline__ void tma_load(uint32_t s_to, const TensorMap& map, uint64_t* s_barrier,
                                         int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(s_to), "l"(&map), "r"(shared_address(s_barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Loads a box into the shared memory of several CTAs of the cluster (multicast). A CTA receives the
// box at s_to if the bit of its rank is set in `ranks`. s_barrier of each such CTA counts the bytes
// that arrive in that CTA.
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

// Stores a box from shared to global memory. There must be an async_fence between earlier stores to
// the box in shared memory and this call.
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

// Waits until the committed stores of this thread have read their source in shared memory. Does not
// wait for the last kPending committed groups.
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
