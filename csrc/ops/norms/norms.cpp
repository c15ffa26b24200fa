// Defines rms_norm, layer_norm, add_rms_norm and add_layer_norm. layers/norm_op.h has the formulas
// and the shapes.
#include "layers/norm_op.h"

namespace torchweld::norms_op {
namespace {

struct RmsNorm {
  static constexpr const char *kOp = "rms_norm", *kForward = "rms_norm_forward",
                              *kBackward = "rms_norm_backward";
  static constexpr bool kCentred = false, kAdds = false;
};

struct LayerNorm {
  static constexpr const char *kOp = "layer_norm", *kForward = "layer_norm_forward",
                              *kBackward = "layer_norm_backward";
  static constexpr bool kCentred = true, kAdds = false;
};

struct AddRmsNorm {
  static constexpr const char *kOp = "add_rms_norm", *kForward = "add_rms_norm_forward",
                              *kBackward = "add_rms_norm_backward";
  static constexpr bool kCentred = false, kAdds = true;
};

struct AddLayerNorm {
  static constexpr const char *kOp = "add_layer_norm", *kForward = "add_layer_norm_forward",
                              *kBackward = "add_layer_norm_backward";
  static constexpr bool kCentred = true, kAdds = true;
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormOp<RmsNorm>::define(m);
  NormOp<LayerNorm>::define(m);
  NormOp<AddRmsNorm>::define(m);
  NormOp<AddLayerNorm>::define(m);
}

}  // namespace
}  // namespace torchweld::norms_op
