// The gradient of softmax over unmasked rows: the launcher. The kernels are in softmax_rows.cuh.
#include "ops/softmax/softmax.h"

#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

void launch_softmax_backward(const SoftmaxBackwardParams& params, const ZeroCounter& counter,
                             cudaStream_t stream) {
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
    launch_softmax_rows<T, /*kBackward=*/true>(args, NoMask{params.n}, counter, stream);
  });
  check_launch("softmax_backward");
}

}  // namespace torchweld
