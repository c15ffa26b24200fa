// The pointwise functions of the linear ops, as host and device name them.
#pragma once

#include <cstdint>

namespace torchweld {

enum class Activation : int8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

enum class Gate : int8_t { kSigmoidTanh, kGeglu, kGegluTanh, kSwiglu, kReglu };

}  // namespace torchweld
