// Changes the register count of the threads of a warpgroup (setmaxnreg).
// NOTE: ptxas ignores setmaxnreg (warning C7508) unless two conditions hold: the kernel has
// __launch_bounds__(threads, 1), and every warpgroup executes one setmaxnreg in a branch of its
// own. setmaxnreg_inc waits until other warpgroups have released enough registers.
#pragma once

#include "device/features.cuh"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

}  // namespace torchweld
