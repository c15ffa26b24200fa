// The gradient of causal_softmax: the launcher. The kernels are the softmax room's.
#include "ops/causal_softmax/causal_softmax.h"

#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                    const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const RowArgs<T> args = {static_cast<const T*>(params.y),
                             static_cast<const T*>(params.dy),
                             static_cast<T*>(params.dx),
                             params.rows,
                             params.n,
                             params.y_row_stride,
                             params.dy_row_stride,
                             0};
    launch_softmax_rows<T, /*kBackward=*/true>(args, mask, counter, stream);
  });
  check_launch("causal_softmax_backward");
}

}  // namespace torchweld
