// causal_softmax and its gradient for one element type. The kernels are the softmax room's.
#pragma once

#include "ops/causal_softmax/causal_softmax.h"
#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

template <typename T>
void launch_causal_softmax_of(const SoftmaxParams& params, const CausalMask& mask,
                              const ZeroCounter& counter, cudaStream_t stream) {
  const RowArgs<T> args = {static_cast<const T*>(params.x),
                           nullptr,
                           static_cast<T*>(params.y),
                           params.rows,
                           params.n,
                           params.x_row_stride,
                           0,
                           0};
  launch_softmax_rows<T, /*kBackward=*/false>(args, mask, counter, stream);
}

template <typename T>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream) {
  const RowArgs<T> args = {static_cast<const T*>(params.y),
                           static_cast<const T*>(params.dy),
                           static_cast<T*>(params.dx),
                           params.rows,
                           params.n,
                           params.y_row_stride,
                           params.dy_row_stride,
                           0};
  launch_softmax_rows<T, /*kBackward=*/true>(args, mask, counter, stream);
}

}  // namespace torchweld
