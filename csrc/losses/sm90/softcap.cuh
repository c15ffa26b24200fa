// The soft cap of logits, for the targets' logits and for those of the matmul's epilogue. Both call
// this function, so that its error cancels where the target dominates its row.
#pragma once

#include "device/activation.cuh"

namespace torchweld {

// Returns softcap * tanh(logit / softcap). inverse is 1 / softcap. tanh(x) is computed as
// x p(x^2) / q(x^2). The coefficients were fitted so that the relative error is below 2e-8 up to
// |x| = 8.7, from where on tanh(x) rounds to 1 or -1. All coefficients are positive, so the sums
// lose no digits.
// NOTE: tanhf would be as accurate, but its two branches diverge. 1 - 2 / (1 + e^2x) needs a second
// formula near 0, and with the choice between both the epilogue spills registers.
__device__ __forceinline__ float capped_logit(float logit, float softcap, float inverse) {
  float x = logit * inverse;
  // NOTE: a NaN must stay NaN. fminf and fmaxf would return 8.7 for it.
  x = fabsf(x) > 8.7f ? copysignf(8.7f, x) : x;
  const float u = x * x;
  float p = fmaf(u, 1.389746375e-8f, 2.099371301e-5f);
  p = fmaf(u, p, 3.518736765e-3f);
  p = fmaf(u, p, 1.340046056e-1f);
  p = fmaf(u, p, 1.f);
  float q = fmaf(u, 7.996459227e-7f, 3.323636104e-4f);
  q = fmaf(u, q, 2.596486631e-2f);
  q = fmaf(u, q, 4.673378079e-1f);
  q = fmaf(u, q, 1.f);
  return softcap * x * p * reciprocal_approx(q);
}

}  // namespace torchweld
