// softmax under the causal mask and what else hides keys, and its gradient: the launchers.
#include "ops/causal_softmax/causal_softmax.h"

#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {
namespace {

bool caps(const AttentionMask& mask) { return mask.softcap > 0.f || mask.sink; }

}  // namespace

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& causal,
                           const AttentionMask& mask, const ZeroCounter& counter,
                           cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    if (caps(mask)) {
      launch_causal_softmax_of<T>(params, CappedMask(causal, mask), counter, stream);
    } else if (mask.given()) {
      launch_causal_softmax_of<T>(params, RangeMask(causal, mask), counter, stream);
    } else {
      launch_causal_softmax_of<T>(params, causal, counter, stream);
    }
  });
  check_launch("causal_softmax");
}

void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const CausalMask& causal,
                                    const AttentionMask& mask, const CappedBackward& capped,
                                    const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    if (caps(mask)) {
      launch_capped_softmax_backward_of<T>(params, CappedMask(causal, mask), capped, stream);
    } else if (mask.given()) {
      launch_causal_softmax_backward_of<T>(params, RangeMask(causal, mask), counter, stream);
    } else {
      launch_causal_softmax_backward_of<T>(params, causal, counter, stream);
    }
  });
  check_launch("causal_softmax_backward");
}

}  // namespace torchweld
