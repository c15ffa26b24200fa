// The device code for one row that the kernels of cross_entropy share.
//
// NOTE: NDEBUG would disable the assertion on the targets. The host can't check them instead,
// because it would have to wait for the GPU.
#pragma once

#undef NDEBUG
#include <cassert>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/cross_entropy/params.h"

namespace torchweld {

// Returns exp(x). For 16-bit gradients, an approximation is enough: its error of 2 ulp and its
// flush of subnormal results are far below 16-bit rounding. fp32 rows use expf.
template <typename T>
__device__ __forceinline__ float loss_exp(float x) {
  if constexpr (sizeof(T) == 2) return exp2_approx_ftz(x * kLog2e);
  return expf(x);
}

// The functor that the reductions of device/reduce.cuh call for exponentials relative to a maximum.
template <typename T>
struct LossExponent {
  __device__ __forceinline__ float operator()(float z, float max) const {
    return loss_exp<T>(z - max);
  }
  __device__ __forceinline__ float rescale(float from, float to) const { return expf(from - to); }
};

// Returns false if the row is ignored.
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

// Returns the statistics of a row from its (max, sum of exponentials) and its sum of z. Only label
// smoothing needs `total`, the sum of z.
__device__ __forceinline__ LogitStatistics<float> row_statistics(const CrossEntropyParams& p,
                                                                 const MaxSum& found, float total,
                                                                 float z_target) {
  // A row whose logits are all -inf gives NaN, as in torch.
  const float max = found.max == -INFINITY ? NAN : found.max;
  return {max, logf(found.sum), z_target - max, total / static_cast<float>(p.n) - max, 0.f};
}

__device__ __forceinline__ RowGradient<float> row_gradient(const CrossEntropyParams& p, int64_t row,
                                                           float lse) {
  return RowGradient<float>::of_loss(p.dloss[row * p.dloss_stride], lse, p.terms, p.n);
}

// Returns the gradient of a logit from its z, without the term of the target.
template <typename T>
__device__ __forceinline__ float logit_gradient(const CrossEntropyParams& p,
                                                const RowGradient<float>& row, float z) {
  return row.of_logit(z, loss_exp<T>(z - row.lse), p.scale);
}

}  // namespace torchweld
