// Flags by which a block of a launch signals another one that data is in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torchweld {

// A flag is set when it holds the launch's own number, so flags are not cleared first (block_flags
// of core/counters.h).
// NOTE: the block that waited for a flag clears it, so that a captured launch may be replayed.
struct BlockFlags {
  uint64_t* flags;
  uint64_t number;  // next_launch_number()

  // One thread calls it, behind a barrier of the threads that have stored the data.
  __device__ __forceinline__ void raise(int64_t i) const {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + i), "l"(number) : "memory");
  }

  // One thread calls it, before a barrier of the threads that load the data.
  __device__ __forceinline__ void wait(int64_t i) const {
    uint64_t flag;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(flag) : "l"(flags + i) : "memory");
    } while (flag != number);
    flags[i] = 0;
  }
};

}  // namespace torchweld
