// layer_norm_linear:  y = activation(normed @ weight.T + bias),
//                     normed = layer_norm(x, (K,), ln_weight, ln_bias, eps)
//   x (..., K), weight (N, K), bias (N,), ln_weight and ln_bias (K,), y (..., N)
//
// layers/norm_linear_op.h defines the op.
#include "layers/norm_linear_op.h"

namespace torchweld::layer_norm_linear_op {
namespace {

struct LayerNorm : LayerNormCpu {
  static constexpr const char *kOp = "layer_norm_linear", *kForward = "layer_norm_linear_forward",
                              *kBackward = "layer_norm_linear_backward";
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormLinear<LayerNorm>::define(
      m,
      "layer_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
      "Tensor? ln_bias=None, *, float eps=1e-5, str activation=\"none\") -> Tensor",
      "layer_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5, "
      "str activation=\"none\") -> (Tensor y, Tensor preact, Tensor mean, Tensor rstd)",
      "layer_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? ln_weight, "
      "Tensor? ln_bias, Tensor mean, Tensor rstd, Tensor? preact=None, *, "
      "str activation=\"none\", bool[5] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)");
}

}  // namespace
}  // namespace torchweld::layer_norm_linear_op
