// Division by a divisor that is known on the host. On the device the division is a multiplication
// and a shift.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// The quotient is exact if the dividend is less than 2^31 and the divisor is in [1, 2^31).
// Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994.
class FastDivisor {
 public:
  explicit FastDivisor(int64_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    const uint64_t excess = (uint64_t{1} << shift_) - static_cast<uint64_t>(divisor);
    multiplier_ = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(divisor) + 1);
  }

  TW_HOST_DEVICE uint32_t divisor() const { return divisor_; }

  TW_HOST_DEVICE uint32_t divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(multiplier_, n);
#else
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(multiplier_) * n) >> 32);
#endif
    return (high + n) >> shift_;
  }

 private:
  uint32_t divisor_;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace torchweld
