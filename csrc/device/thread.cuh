// The index of a thread in its block, read anew at every call.
#pragma once

#include <cuda_runtime_api.h>

namespace torchweld {

// Returns threadIdx.x. The compiler can't reuse the result of an earlier call.
// NOTE: a value that is computed from fresh_thread() is computed again at every use, so it does not
// occupy a register between the uses. This matters in loops that need all registers.
__device__ __forceinline__ int fresh_thread() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace torchweld
