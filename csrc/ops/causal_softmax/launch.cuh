// Launches causal_softmax and its backward for one element type and mask. The kernels are in
// csrc/softmax, except for the kernel of the backward with softcap or a sink.
#pragma once

#include "ops/causal_softmax/capped_backward.cuh"
#include "ops/causal_softmax/causal_softmax.h"
#include "softmax/launch.cuh"

namespace torchweld {

template <typename T, typename Mask>
void launch_causal_softmax_of(const SoftmaxParams& params, const Mask& mask,
                              const ZeroCounter& counter, cudaStream_t stream) {
  launch_softmax_rows<T, /*kBackward=*/false>(row_args<T>(params), mask, counter, stream);
}

template <typename T, typename Mask>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const Mask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream) {
  launch_softmax_rows<T, /*kBackward=*/true>(row_args<T>(params), mask, counter, stream);
}

template <typename T>
void launch_capped_softmax_backward_of(const SoftmaxBackwardParams& params,
                                       const ScoresMask<MaskKind::kCapped>& mask,
                                       const CappedBackward& capped, cudaStream_t stream) {
  const RowArgs<T> args = row_args<T>(params);
  SoftmaxProblem problem = softmax_problem<T, /*kBackward=*/true>(args, mask);
  problem.in_phase &= rows_in_phase(args, static_cast<const T*>(capped.scores), capped.row_stride);
  pick_softmax(problem);  // records the call for `explain`; there is only one kernel
  const auto launch = [&](auto elems) {
    const auto kernel = capped_softmax_backward_kernel<T, elems.value>;
    const auto threads = static_cast<unsigned>(softmax_stream_threads(problem));
    for_each_grid(args, 1, [&](const auto& part, int64_t blocks) {
      launch_kernel(kernel, {blocks, threads}, stream, part, mask, capped);
    });
  };
  if (problem.aligned && problem.in_phase) {
    launch(std::integral_constant<int, kVectorBytes / sizeof(T)>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
}

}  // namespace torchweld
