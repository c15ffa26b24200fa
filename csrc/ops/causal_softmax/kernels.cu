// The launchers of causal_softmax and its backward.
#include "ops/causal_softmax/causal_softmax.h"

#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {
namespace {

// Calls body with a ScoresMask of the kind that the call's mask needs.
template <typename Body>
void with_scores_mask(const ScoresParams& s, const Body& body) {
  switch (mask_kind(s.mask)) {
    case MaskKind::kCausal:
      return body(ScoresMask<MaskKind::kCausal>(s.mask, s.rows_per_batch, s.scale));
    case MaskKind::kRange:
      return body(ScoresMask<MaskKind::kRange>(s.mask, s.rows_per_batch, s.scale));
    case MaskKind::kCapped:
      return body(ScoresMask<MaskKind::kCapped>(s.mask, s.rows_per_batch, s.scale));
  }
}

}  // namespace

void launch_causal_softmax(const SoftmaxParams& params, const ScoresParams& scores,
                           const ZeroCounter& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    with_scores_mask(scores, [&](const auto& mask) {
      launch_causal_softmax_of<decltype(element)>(params, mask, counter, stream);
    });
  });
  check_launch("causal_softmax");
}

void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const ScoresParams& scores,
                                    const CappedBackward& capped, const ZeroCounter& counter,
                                    cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    with_scores_mask(scores, [&](const auto& mask) {
      if constexpr (std::decay_t<decltype(mask)>::kCapped) {
        launch_capped_softmax_backward_of<T>(params, mask, capped, stream);
      } else {
        launch_causal_softmax_backward_of<T>(params, mask, counter, stream);
      }
    });
  });
  check_launch("causal_softmax_backward");
}

}  // namespace torchweld
