// The soft cap of logits, for the targets' logits and for those of the matmul's epilogue. Both call
// this function, so that its error cancels where the target dominates its row.
#pragma once

#include "device/activation.cuh"

namespace torchweld {

// Returns softcap * tanh(logit / softcap); inverse is 1 / softcap. The error of tanh is below 2e-7:
// for |x| <= 0.6 a polynomial fitted to tanh, and 1 - 2 / (1 + e^(2 |x|)) elsewhere.
// NOTE: tanhf would be as accurate, but its two branches diverge.
__device__ __forceinline__ float capped_logit(float logit, float softcap, float inverse) {
  constexpr float kLinear = 2.f * kLog2e;
  const float x = logit * inverse, square = x * x, size = fabsf(x);
  float series = fmaf(square, 0.015612693f, -0.052211851f);
  series = fmaf(square, series, 0.13313118f);
  series = fmaf(square, series, -0.33332598f);
  series = fmaf(series * square, x, x);
  const float other = fmaf(-2.f, one_over_one_plus_exp2(size * kLinear), 1.f);
  return softcap * (size <= 0.6f ? series : copysignf(other, x));
}

}  // namespace torchweld
