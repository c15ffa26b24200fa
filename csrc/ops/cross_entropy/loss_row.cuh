// The formulas of a row on the device, shared by the kernels of cross_entropy.
//
// NOTE: NDEBUG would turn off the assertion on targets, which the host can't check without waiting.
#pragma once

#undef NDEBUG
#include <cassert>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/cross_entropy/params.h"

namespace torchweld {

// exp(x). The approximation's error of 2 ulp and its lack of subnormal results are far below a
// 16-bit gradient; fp32 rows use expf.
template <typename T>
__device__ __forceinline__ float loss_exp(float x) {
  if constexpr (sizeof(T) == 2) return exp2_approx_ftz(x * kLog2e);
  return expf(x);
}

// Exponentials relative to a maximum, as the reductions of device/reduce.cuh call them.
template <typename T>
struct LossExponent {
  __device__ __forceinline__ float operator()(float z, float max) const {
    return loss_exp<T>(z - max);
  }
  __device__ __forceinline__ float rescale(float from, float to) const { return expf(from - to); }
};

// Whether the row counts for the loss.
__device__ __forceinline__ bool has_target(const CrossEntropyParams& p, int64_t target) {
  if (target == p.ignore_index) return false;
  assert(target >= 0 && target < p.n && "torchweld: target must be from 0 to N - 1");
  return true;
}

__device__ __forceinline__ float scaled_logit(const CrossEntropyParams& p, float logit) {
  if (p.scale.softcap != 0.f) logit = p.scale.softcap * tanhf(logit / p.scale.softcap);
  return p.scale.temperature == 1.f ? logit : logit / p.scale.temperature;
}

template <typename T>
__device__ __forceinline__ float target_logit(const CrossEntropyParams& p, int64_t row,
                                              int64_t target) {
  return scaled_logit(p, to_float(static_cast<const T*>(p.logits)[row * p.row_stride + target]));
}

// The statistics of a row from its (max, sum) and the sum of z, which only label smoothing needs.
__device__ __forceinline__ LogitStatistics<float> row_statistics(const CrossEntropyParams& p,
                                                                 const MaxSum& found, float total,
                                                                 float z_target) {
  // A row of only -inf is NaN, as in torch.
  const float max = found.max == -INFINITY ? NAN : found.max;
  return {max, logf(found.sum), z_target - max, total / static_cast<float>(p.n) - max, 0.f};
}

__device__ __forceinline__ RowGradient<float> row_gradient(const CrossEntropyParams& p, int64_t row,
                                                           float lse) {
  return RowGradient<float>::of_loss(p.dloss[row * p.dloss_stride], lse, p.terms, p.n);
}

// The gradient of the logit of column j, from z.
template <typename T>
__device__ __forceinline__ float logit_gradient(const CrossEntropyParams& p,
                                                const RowGradient<float>& row, float z) {
  return row.of_logit(z, loss_exp<T>(z - row.lse), p.scale);
}

}  // namespace torchweld
