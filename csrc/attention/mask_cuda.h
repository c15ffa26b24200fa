// Converts a Mask to the MaskParams of the CUDA kernels. This is host code for CUDA builds only.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/mask_arguments.h"
#include "core/cuda_inputs.h"

namespace torchweld {

// Returns the mask in the form that the kernels read: contiguous tensors, and sinks in fp32.
inline Mask kernel_mask(const Mask& mask) {
  Mask result = mask.contiguous();
  if (is_given(result.sink)) result.sink = result.sink->to(at::kFloat);
  return result;
}

// Returns the mask's parameters for kernels. `mask` must come from kernel_mask. The tensors of
// `mask` must outlive the result.
inline MaskParams kernel_params(const Mask& mask, int64_t seqlen_q, int64_t seqlen_k) {
  MaskParams params = mask.params(
      seqlen_q, seqlen_k, [](const Tensor& t, auto zero) { return const_data<decltype(zero)>(t); });
  // NOTE: the clamp keeps the cap in the range of fp32. A cap below this range would become 0, and
  // a cap above this range would become infinite. In both cases, the scores would be lost.
  if (mask.softcap) {
    params.softcap = static_cast<float>(std::clamp<double>(*mask.softcap, FLT_MIN, 1e30));
  }
  if (is_given(mask.sink)) params.sink = const_data<float>(*mask.sink);
  return params;
}

}  // namespace torchweld
