// Registers that a warpgroup gives up or takes (setmaxnreg).
// NOTE: the kernel must have __launch_bounds__(threads, 1), and every warpgroup must come here in
// one branch: else the assembler ignores it (C7508). What is taken waits until it has been given
// up.
#pragma once

#include "device/features.cuh"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

}  // namespace torchweld
