// Parses the argument `keep`, which selects what the forward stores for the backward.
#pragma once

#include "losses/exponentials.h"

namespace torchweld::linear_cross_entropy_op {

enum class Keep { kExponentials, kGradients, kNothing };

// NOTE: with keep="gradients", the forward stores the gradients for dloss = 1, that is, without a
// loss scale. float16 does not support this, because the gradients of a mean over many rows would
// underflow to 0.
inline Keep parse_keep(const char* op, c10::string_view name, const LossOptions& options,
                       const Tensor& x, const Tensor& weight) {
  const bool reduced = options.reduction != Reduction::kNone;
  const bool fits = reduced && x.scalar_type() != at::kHalf;
  if (name == "nothing") return Keep::kNothing;
  if (name == "auto") {
    if (has_exponentials_kernels(x, weight, options)) return Keep::kExponentials;
    return fits ? Keep::kGradients : Keep::kNothing;
  }
  if (name == "exponentials") {
    TW_CHECK(options.label_smoothing == 0 || !options.softcap, op,
             "keep='exponentials' must have label_smoothing 0 with a softcap, but got ",
             options.label_smoothing, "; use keep='auto'");
    TW_CHECK(!options.mean || !options.softcap, op,
             "keep='exponentials' must have mean False with a softcap, but got True; use "
             "keep='auto'");
    return Keep::kExponentials;
  }
  TW_CHECK(name == "gradients", op,
           "keep must be 'auto', 'exponentials', 'gradients' or 'nothing', but got '",
           std::string(name), "'");
  TW_CHECK(reduced, op,
           "keep='gradients' must have reduction 'mean' or 'sum', but got 'none'; use keep='auto'");
  TW_CHECK(fits, op,
           "keep='gradients' must have float32 or bfloat16 tensors, but got float16, in which "
           "gradients before the loss scale are lost; use keep='auto'");
  return Keep::kGradients;
}

}  // namespace torchweld::linear_cross_entropy_op
