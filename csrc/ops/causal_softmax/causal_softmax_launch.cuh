// causal_softmax and its gradient for one element type. The kernels are the softmax room's.
#pragma once

#include "ops/causal_softmax/causal_softmax.h"
#include "ops/softmax/softmax_launch.cuh"

namespace torchweld {

template <typename T>
void launch_causal_softmax_of(const SoftmaxParams& params, const CausalMask& mask,
                              const ZeroCounter& counter, cudaStream_t stream) {
  launch_softmax_rows<T, /*kBackward=*/false>(row_args<T>(params), mask, counter, stream);
}

template <typename T>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream) {
  launch_softmax_rows<T, /*kBackward=*/true>(row_args<T>(params), mask, counter, stream);
}

}  // namespace torchweld
