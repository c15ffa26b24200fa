// Turns a Mask into the MaskParams of the CUDA kernels. Host code of CUDA builds only.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/mask_arguments.h"
#include "core/cuda_inputs.h"

namespace torchweld {

// The mask with tensors as the kernels read them: contiguous, sinks in fp32.
inline Mask kernel_mask(const Mask& mask) {
  Mask result = mask.contiguous();
  if (is_given(result.sink)) result.sink = result.sink->to(at::kFloat);
  return result;
}

// `mask` is a kernel_mask; its tensors must outlive the parameters.
inline MaskParams kernel_params(const Mask& mask, int64_t seqlen_q, int64_t seqlen_k) {
  MaskParams params =
      mask.params(seqlen_q, seqlen_k, [](const Tensor& t) { return const_data<int32_t>(t); });
  // NOTE: in fp32 a smaller cap would be 0 and a larger one infinite, and the scores be lost.
  if (mask.softcap) {
    params.softcap = static_cast<float>(std::clamp<double>(*mask.softcap, FLT_MIN, 1e30));
  }
  if (is_given(mask.sink)) params.sink = const_data<float>(*mask.sink);
  return params;
}

}  // namespace torchweld
