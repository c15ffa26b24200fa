// Converts a Mask to the MaskParams of the CUDA kernels. This is host code for CUDA builds only.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/mask_arguments.h"
#include "core/cuda_inputs.h"

namespace torchweld {

// Returns `t`, or a copy of `t` if the rows of `t` don't meet the requirements of
// AttentionTensor.
inline Tensor attention_rows(const Tensor& t) {
  const int64_t elems = 16 / t.element_size(), cols = t.size(3);
  bool aligned = cols % elems == 0 && t.stride(3) == 1 &&
                 reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) aligned &= t.size(d) <= 1 || t.stride(d) % elems == 0;
  if (aligned || t.numel() == 0) return t;
  const int64_t padded = (cols + elems - 1) / elems * elems;
  return at::zeros({t.size(0), t.size(1), t.size(2), padded}, t.options())
      .narrow(3, 0, cols)
      .copy_(t);
}

// Returns the bias with rows that meet the requirements of AttentionTensor, and without copies of
// expanded dimensions.
inline Tensor kernel_bias(Tensor bias) {
  for (int64_t d = 0; d < 3; ++d) {
    if (bias.stride(d) == 0 && bias.size(d) > 1) bias = bias.narrow(d, 0, 1);
  }
  return attention_rows(bias);
}

// Returns the mask in the form that the kernels read: contiguous tensors, sinks and slopes in fp32.
inline Mask kernel_mask(const Mask& mask) {
  Mask result = mask.contiguous();
  if (is_given(result.sink)) result.sink = result.sink->to(at::kFloat);
  if (is_given(result.alibi_slopes)) result.alibi_slopes = result.alibi_slopes->to(at::kFloat);
  if (is_given(result.bias)) result.bias = kernel_bias(*result.bias);
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
  if (is_given(mask.alibi_slopes)) params.alibi = const_data<float>(*mask.alibi_slopes);
  if (is_given(mask.bias)) {
    const Tensor& bias = *mask.bias;
    const auto stride = [&](int64_t d) { return bias.size(d) > 1 ? bias.stride(d) : 0; };
    params.bias = {const_data<void>(bias), stride(0), stride(1), stride(2)};
  }
  return params;
}

}  // namespace torchweld
