// Defines how the scale and the soft cap convert scores into probabilities. Also defines the last
// step of the softmax of a row. This code is for host and device.
#pragma once

#include <cmath>

#include "core/macros.h"

namespace torchweld {

// The scale of the scores: p = 2^((sign * s - max) * c), lse = size * max + log(sum). If the scale
// is 0, the scores are still multiplied by 0, so that an infinite score gives NaN as in torch.
struct ScoreScale {
  static constexpr float kLog2OfE = 1.44269504088896341f;
  float sign;
  float size;
  float c;

  TW_HOST_DEVICE explicit ScoreScale(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        size(scale == 0.f ? 1.f : (scale < 0.f ? -scale : scale)),
        c(size * kLog2OfE) {}

#ifdef __CUDACC__
  // Returns the lse of a row. A row that sees only scores of -inf gives NaN, as in torch.
  __device__ __forceinline__ float lse(float max, float sum) const {
    return sum > 0.f ? fmaf(max, size, logf(sum)) : NAN;
  }
#endif
};

// A polynomial in x^2 that approximates tanh(x) / x. It has kTerms (3, 4 or 6) terms and a relative
// error of 2^-20. The terms were fitted by least squares with weights that equalise the errors.
template <int kTerms>
struct SmallTanh {
  // The largest |x| for which the relative error is at most 2^-20.
  static constexpr float kMax = kTerms == 3 ? 0.25f : kTerms == 4 ? 0.5f : 1.f;
  // The coefficient of x^(2 i).
  static TW_HOST_DEVICE constexpr float term(int i) {
    constexpr float kThree[] = {0.9999996f, -0.33321908f, 0.12841614f};
    constexpr float kFour[] = {0.99999946f, -0.33326318f, 0.13190296f, -0.04440222f};
    constexpr float kSix[] = {0.9999994f,    -0.33329043f, 0.13281433f,
                              -0.051605675f, 0.016743116f, -0.0030670604f};
    return kTerms == 3 ? kThree[i] : kTerms == 4 ? kFour[i] : kSix[i];
  }
};

// Computes the exponent c * tanh(score * cap) for |score| <= max_score. The exponent is `score`
// times a polynomial in score^2. If a coefficient of the polynomial is not a normal fp32 number,
// max_score is -1.
template <int kTerms>
struct SmallExponent {
  float max_score;
  float terms[kTerms];

  TW_HOST_DEVICE SmallExponent(float c, float cap) : max_score(SmallTanh<kTerms>::kMax / cap) {
    float factor = c * cap;
    for (int i = 0; i < kTerms; ++i, factor *= cap * cap) {
      terms[i] = factor * SmallTanh<kTerms>::term(i);
    }
    // The last coefficient is the smallest one if cap is below 1, and the largest one otherwise.
    const float last = terms[kTerms - 1] < 0.f ? -terms[kTerms - 1] : terms[kTerms - 1];
    if (!(last > 1e-37f && last < 1e37f)) max_score = -1.f;
  }

#ifdef __CUDACC__
  // Returns the exponent of `score`, minus `shift`.
  __device__ __forceinline__ float operator()(float score, float shift) const {
    const float square = score * score;
    float y = terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) y = fmaf(square, y, terms[i]);
    return fmaf(score, y, -shift);
  }
#endif
};

// ScoreScale with a soft cap. A score first becomes tanh(score * cap). `size` and `c` multiply this
// result.
struct CappedScale : ScoreScale {
  float softcap;  // 0 if the call has no softcap
  float cap;

  TW_HOST_DEVICE CappedScale(float scale, float softcap)
      : ScoreScale(scale), softcap(softcap), cap(softcap > 0.f ? size / softcap : 0.f) {
    if (softcap > 0.f) size = softcap, c = softcap * kLog2OfE;
  }
};

#ifdef __CUDACC__
// The factor that normalises the sums of a row, and lse of the row.
struct FinishedRow {
  float factor;
  float lse;
};

// Computes the last step of the softmax of a row. `sink` is the logit of the sink, or -inf if there
// is no sink. The function adds the exponential of the sink to the sum of the row. The result is
// exact for any sink, and also for a row that sees only scores of -inf.
__device__ __forceinline__ FinishedRow finish_row(const ScoreScale& scale, float max, float sum,
                                                  float sink) {
  if (sink > max * scale.size) {
    const float shrink = expf(fmaf(max, scale.size, -sink));
    const float total = fmaf(sum, shrink, 1.f);
    return {shrink / total, sink + logf(total)};
  }
  sum += expf(fmaf(-max, scale.size, sink));
  return {1.f / sum, scale.lse(max, sum)};
}
#endif

}  // namespace torchweld
