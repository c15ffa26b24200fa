// The thread's index in its block.
#pragma once

#include <cuda_runtime_api.h>

namespace torchweld {

// threadIdx.x as a value that the compiler can't reuse.
// NOTE: values that depend on it are recomputed where they are used, instead of occupying registers
// through a loop that has none to spare.
__device__ __forceinline__ int fresh_thread() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace torchweld
