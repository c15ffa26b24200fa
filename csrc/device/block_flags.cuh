// Flags in global memory. A block sets a flag after it has stored its data. Another block of the
// same launch waits for the flag before it loads these data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// A flag is set if it holds the number of this launch. A number of an earlier launch does not
// count, so the flags need not be cleared before a launch. block_flags in core/counters.h allocates
// the flags.
// NOTE: the block that has waited for a flag sets the flag to 0. A captured launch has the same
// number in every replay, so no flag may still be set when a replay begins.
struct BlockFlags {
  uint64_t* flags;
  uint64_t number;  // the number of this launch, from next_launch_number()

  // Sets flag i. One thread must call this function after the threads that stored the data have
  // passed a barrier.
  __device__ __forceinline__ void raise(int64_t i) const {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + i), "l"(number) : "memory");
  }

  // Returns whether flag i is set. Exactly one thread waits for a flag, and then clears it. The
  // threads that load the data must wait for that thread at a barrier.
  __device__ __forceinline__ bool is_set(int64_t i) const {
    uint64_t flag;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(flag) : "l"(flags + i) : "memory");
    return flag == number;
  }
  __device__ __forceinline__ void clear(int64_t i) const { flags[i] = 0; }

  // Waits until flag i is set, then clears the flag.
  __device__ __forceinline__ void wait(int64_t i) const {
    while (!is_set(i)) {
    }
    clear(i);
  }
};

}  // namespace torchweld
