// Launches the kernel of norm/forward.cuh for a dtype.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "norm/norm.h"

namespace torchweld {

void launch_norm(const NormParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype,
                 [&](auto element) { launch_norm_of<decltype(element)>(params, stream); });
  check_launch("norm");
}

}  // namespace torchweld
