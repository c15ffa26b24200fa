// The activations and gates of the linear ops, for host and device.
#pragma once

#include <cstdint>

namespace torchweld {

enum class Activation : int8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kReluSquared };

enum class Gate : int8_t { kSigmoidTanh, kGeglu, kGegluTanh, kSwiglu, kReglu };

}  // namespace torchweld
