// rms_norm_linear computes y = activation((x * rstd * scale) @ weight.T + bias), where
// rstd = 1 / sqrt(mean(x * x) + eps) and scale = norm_weight + weight_offset.
//   x (..., K), weight (N, K), bias (N,), norm_weight (K,), y (..., N)
//
// layers/norm_linear_op.h defines the op.
#include "layers/norm_linear_op.h"

namespace torchweld::rms_norm_linear_op {
namespace {

struct RmsNorm : RmsNormCpu {
  static constexpr const char *kOp = "rms_norm_linear", *kForward = "rms_norm_linear_forward",
                              *kBackward = "rms_norm_linear_backward";
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormLinear<RmsNorm>::define(
      m,
      "rms_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, *, "
      "float eps=1e-6, float weight_offset=0, str activation=\"none\") -> Tensor",
      "rms_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? norm_weight=None, *, float eps=1e-6, float weight_offset=0, "
      "str activation=\"none\") -> "
      "(Tensor y, Tensor preact, Tensor rstd)",
      "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? norm_weight, "
      "Tensor rstd, Tensor? preact=None, *, float weight_offset=0, str activation=\"none\", "
      "bool[4] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm_weight)");
}

}  // namespace
}  // namespace torchweld::rms_norm_linear_op
