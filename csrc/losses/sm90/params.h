// The kernel parameters of the matmul whose epilogue computes exponentials. This header does not
// use torch.
#pragma once

#include "gemm/sm90/launch.h"
#include "losses/sm90/exponentials.h"

namespace torchweld::sm90 {

// kCapped is true if there is a softcap. kMoment is true if tile_moment is requested.
template <bool kCapped, bool kMoment>
struct ExponentialsKernelParams : KernelParams {
  ExponentialsParams exponentials;
};

}  // namespace torchweld::sm90
