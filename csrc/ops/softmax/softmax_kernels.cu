// softmax over unmasked rows: the launcher. The kernels are in softmax_rows.cuh.
#include "ops/softmax/softmax.h"

#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

void launch_softmax(const SoftmaxParams& params, const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const RowArgs<T> args = {static_cast<const T*>(params.x),
                             nullptr,
                             static_cast<T*>(params.y),
                             params.rows,
                             params.n,
                             params.x_row_stride,
                             0,
                             0};
    launch_softmax_rows<T, /*kBackward=*/false>(args, NoMask{params.n}, counter, stream);
  });
  check_launch("softmax");
}

}  // namespace torchweld
