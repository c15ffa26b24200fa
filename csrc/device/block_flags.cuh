// Flags in global memory with which one block of a launch tells another block that its data is in
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// A flag counts as set if it holds the number of this launch, so flags need no clearing before a
// launch (block_flags in core/counters.h).
// NOTE: the block that waits for a flag then sets it to 0, so that a captured launch can be
// replayed.
struct BlockFlags {
  uint64_t* flags;
  uint64_t number;  // next_launch_number()

  // Sets flag i. One thread calls this, after a barrier of the threads that have stored the data.
  __device__ __forceinline__ void raise(int64_t i) const {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + i), "l"(number) : "memory");
  }

  // Waits for flag i. One thread calls this, before a barrier of the threads that load the data.
  __device__ __forceinline__ void wait(int64_t i) const {
    uint64_t flag;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(flag) : "l"(flags + i) : "memory");
    } while (flag != number);
    flags[i] = 0;
  }
};

}  // namespace torchweld
