// softmax under the causal and left-padding mask, and its gradient: the launchers.
#include "ops/causal_softmax/causal_softmax.h"

#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& mask,
                           const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_causal_softmax_of<decltype(element)>(params, mask, counter, stream);
  });
  check_launch("causal_softmax");
}

void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                    const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_causal_softmax_backward_of<decltype(element)>(params, mask, counter, stream);
  });
  check_launch("causal_softmax_backward");
}

}  // namespace torchweld
