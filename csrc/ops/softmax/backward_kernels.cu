// Launches the backward of softmax over unmasked rows. The kernels are in csrc/softmax.
#include "softmax/params.h"

#include "softmax/launch.cuh"

namespace torchweld {

void launch_softmax_backward(const SoftmaxBackwardParams& params, const ZeroCounter& counter,
                             cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    launch_softmax_rows<T, /*kBackward=*/true>(row_args<T>(params), NoMask{params.n}, counter,
                                               stream);
  });
  check_launch("softmax_backward");
}

}  // namespace torchweld
