// Arithmetic of indices and counts, for host and device.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// Returns n / by, rounded up. n must be at least 0.
TW_HOST_DEVICE constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

TW_HOST_DEVICE constexpr int clamp_int(int64_t x, int low, int high) {
  return static_cast<int>(x < low ? low : (x > high ? high : x));
}

}  // namespace torchweld
