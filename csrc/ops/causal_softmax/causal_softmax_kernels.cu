// softmax under the causal and left-padding mask: the launcher. The kernels are the softmax room's.
#include "ops/causal_softmax/causal_softmax.h"

#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& mask,
                           const ZeroCounter& counter, cudaStream_t stream) {
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
    launch_softmax_rows<T, /*kBackward=*/false>(args, mask, counter, stream);
  });
  check_launch("causal_softmax");
}

}  // namespace torchweld
