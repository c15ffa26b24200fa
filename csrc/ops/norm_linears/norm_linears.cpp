// rms_norm_linears and layer_norm_linears multiply the normalised rows of x by several weights, for
// example those of query, key and value. layers/norm_linears_op.h defines the ops.
#include "layers/norm_linears_op.h"

namespace torchweld::norm_linears_op {
namespace {

struct RmsNorm : RmsNormCpu {
  static constexpr const char *kOp = "rms_norm_linears", *kForward = "rms_norm_linears_forward",
                              *kBackward = "rms_norm_linears_backward";
};

struct LayerNorm : LayerNormCpu {
  static constexpr const char *kOp = "layer_norm_linears", *kForward = "layer_norm_linears_forward",
                              *kBackward = "layer_norm_linears_backward";
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormLinears<RmsNorm>::define(
      m,
      "rms_norm_linears(Tensor x, Tensor[] weights, Tensor[]? biases=None, Tensor? "
      "norm_weight=None, *, "
      "float eps=1e-6, float weight_offset=0) -> Tensor[]",
      "rms_norm_linears_forward(Tensor x, Tensor[] weights, Tensor[]? biases=None, "
      "Tensor? norm_weight=None, *, float eps=1e-6, float weight_offset=0) -> "
      "Tensor[]",
      "rms_norm_linears_backward(Tensor[] dys, Tensor x, Tensor[] weights, Tensor? norm_weight, "
      "Tensor rstd, bool[4] output_mask, *, float weight_offset=0) -> Tensor[]");
  NormLinears<LayerNorm>::define(
      m,
      "layer_norm_linears(Tensor x, Tensor[] weights, Tensor[]? biases=None, Tensor? "
      "ln_weight=None, "
      "Tensor? ln_bias=None, *, float eps=1e-5) -> Tensor[]",
      "layer_norm_linears_forward(Tensor x, Tensor[] weights, Tensor[]? biases=None, "
      "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5) -> Tensor[]",
      "layer_norm_linears_backward(Tensor[] dys, Tensor x, Tensor[] weights, Tensor? ln_weight, "
      "Tensor? ln_bias, Tensor mean, Tensor rstd, bool[5] output_mask) -> Tensor[]");
}

}  // namespace
}  // namespace torchweld::norm_linears_op
