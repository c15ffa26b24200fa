// The formulas of a loss for one row of logits, for the CPU and CUDA. z are the scaled logits of
// the row, t is the index of its target, p = softmax(z) and lse = logsumexp(z):
//
//   cross entropy   loss = (1 - eps) (lse - z_t) + eps (lse - mean(z)) + z_loss lse^2
//   log-probability logprob = z_t - lse,   entropy = lse - sum(p z)
//
// eps is label_smoothing. The statistics of a row are stored relative to the row's maximum. With
// absolute statistics, a small loss would be the difference of two large numbers and lose digits.
#pragma once

#include <cmath>

#include "core/macros.h"

namespace torchweld {

// The softcap and the temperature of logits: z = softcap tanh(logit / softcap) / temperature. If
// softcap is 0, there is no softcap: z = logit / temperature.
template <typename T>
struct LogitScale {
  T softcap, temperature;

  TW_HOST_DEVICE bool identity() const { return softcap == T(0) && temperature == T(1); }
  // Returns the derivative dz / dlogit at the logit whose scaled value is z.
  TW_HOST_DEVICE T slope(T z) const {
    const T tanh = softcap == T(0) ? T(0) : z * temperature / softcap;
    return (T(1) - tanh * tanh) / temperature;
  }
};

template <typename T>
struct LogitStatistics {
  T max;          // max(z)
  T log_sum;      // lse - max
  T target;       // z_t - max
  T mean;         // mean(z) - max; used only for label smoothing and for the result mean(z)
  T expectation;  // sum(p z) - max; used only for the entropy

  // NOTE: if all logits are -inf, max + log_sum may be NaN.
  TW_HOST_DEVICE T lse() const { return max == -T(INFINITY) ? max : max + log_sum; }
  TW_HOST_DEVICE T row_mean() const { return max == -T(INFINITY) ? max : max + mean; }
  TW_HOST_DEVICE T logprob() const { return target - log_sum; }
  TW_HOST_DEVICE T entropy() const { return log_sum - expectation; }
};

// The mean of a row is computed from the sum of z - pivot, which has the size of the differences
// between the logits. If the target's logit is not finite, the sum is not finite either.
template <typename T>
TW_HOST_DEVICE T pivot_of(T z_target) {
  return z_target - z_target == T(0) ? z_target : T(0);
}

template <typename T>
struct CrossEntropyTerms {
  T label_smoothing, z_loss;

  // NOTE: a term with weight 0 is skipped, because 0 times an infinite term would be NaN.
  TW_HOST_DEVICE T loss(const LogitStatistics<T>& row) const {
    T loss = (T(1) - label_smoothing) * (row.log_sum - row.target);
    if (label_smoothing != T(0)) loss += label_smoothing * (row.log_sum - row.mean);
    if (z_loss != T(0)) loss += z_loss * row.lse() * row.lse();
    return loss;
  }
};

// The gradient of a row's loss, or of its log-probability and entropy, with respect to z_j:
//   p_j (scale + entropy_scale (z_j - expectation)) + uniform + (j == t ? target : 0)
template <typename T>
struct RowGradient {
  T shift;  // p_j = exp(z_j - shift)
  T scale, entropy_scale, expectation, uniform, target;

  // dlse and dmean are the gradients with respect to lse and mean(z), if the op also returns lse or
  // mean(z).
  TW_HOST_DEVICE static RowGradient of_loss(T dloss, T lse, const CrossEntropyTerms<T>& terms,
                                            int64_t n, T dlse = T(0), T dmean = T(0)) {
    const T eps = terms.label_smoothing, scale = dloss * (T(1) + T(2) * terms.z_loss * lse) + dlse;
    const T uniform = (dmean - dloss * eps) / static_cast<T>(n);
    return {lse, scale, T(0), T(0), uniform, -dloss * (T(1) - eps)};
  }
  // Returns the gradient of a loss with a shift of `max` instead of lse = max + log_sum.
  // NOTE: lse is rounded at the size of the logits, and so is z - lse. z - max is exact.
  TW_HOST_DEVICE static RowGradient of_loss(T dloss, T max, T log_sum,
                                            const CrossEntropyTerms<T>& terms, int64_t n) {
    RowGradient row = of_loss(dloss, max + log_sum, terms, n);
    row.shift = max;
    row.scale *= std::exp(-log_sum);
    return row;
  }
  // `entropy` is the entropy of the row. If dentropy is 0, the function ignores `entropy`.
  TW_HOST_DEVICE static RowGradient of_logprob(T dlogprob, T dentropy, T lse, T entropy) {
    return {lse, -dlogprob, -dentropy, dentropy == T(0) ? T(0) : lse - entropy, T(0), dlogprob};
  }

  // Returns the gradient with respect to the logit whose scaled value is z. The result does not
  // include the term of the target. p must be exp(z - shift). If z is -inf, p is 0, and the entropy
  // term of the gradient is 0.
  TW_HOST_DEVICE T of_logit(T z, T p, const LogitScale<T>& logit_scale) const {
    T factor = scale;
    if (entropy_scale != T(0) && p > T(0)) factor += entropy_scale * (z - expectation);
    return (p * factor + uniform) * logit_scale.slope(z);
  }
};

}  // namespace torchweld
