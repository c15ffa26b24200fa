// The index of a thread in its block, read anew at every call.
#pragma once

#include <cuda_runtime_api.h>

namespace torchweld {

// Returns threadIdx.x as a value that the compiler can't reuse.
// NOTE: values that depend on it are recomputed at every use. In a loop that has no registers to
// spare they would otherwise occupy registers throughout.
__device__ __forceinline__ int fresh_thread() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace torchweld
