// The thread's place in its block.
#pragma once

#include <cuda_runtime_api.h>

namespace torchweld {

// threadIdx.x, as a value that the compiler takes for new.
// NOTE: what depends on it is computed anew where it is used, instead of being kept in registers
// through a loop that has none to spare.
__device__ __forceinline__ int fresh_thread() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace torchweld
