// Device functions for one row. All kernels of cross_entropy use them.
//
// NOTE: an assertion checks the targets. NDEBUG would disable it, so this file undefines NDEBUG.
// The host does not check the targets, because it would have to wait for the GPU.
#pragma once

#undef NDEBUG
#include <cassert>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/cross_entropy/params.h"

namespace torchweld {

// Returns exp(x). For 16-bit rows, the result is an approximation: its error is 2 ulp, and
// subnormal results become 0. Both effects are far below the rounding to 16 bits. For fp32 rows,
// the function calls expf.
template <typename T>
__device__ __forceinline__ float loss_exp(float x) {
  if constexpr (sizeof(T) == 2) return exp2_approx_ftz(x * kLog2e);
  return expf(x);
}

// A functor that computes exponentials relative to a maximum. The reductions of device/reduce.cuh
// call this functor.
template <typename T>
struct LossExponent {
  __device__ __forceinline__ float operator()(float z, float max) const {
    return loss_exp<T>(z - max);
  }
  __device__ __forceinline__ float rescale(float from, float to) const { return expf(from - to); }
};

// Returns true if the row has a target, and false if the row is ignored.
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

// Returns the statistics of a row. `found` is the row's (max, sum of exponentials), and `total` is
// the row's sum of z - pivot. Only label smoothing needs `total`.
__device__ __forceinline__ LogitStatistics<float> row_statistics(const CrossEntropyParams& p,
                                                                 const MaxSum& found, float total,
                                                                 float z_target) {
  // If all logits of a row are -inf, the results of the row are NaN, as in torch.
  const float max = found.max == -INFINITY ? NAN : found.max;
  return {max, logf(found.sum), z_target - max,
          total / static_cast<float>(p.n) + (pivot_of(z_target) - max), 0.f};
}

__device__ __forceinline__ RowGradient<float> row_gradient(const CrossEntropyParams& p, int64_t row,
                                                           float max, float log_sum) {
  return RowGradient<float>::of_loss(p.dloss[row * p.dloss_stride], max, log_sum, p.terms, p.n);
}

// Returns the gradient with respect to a logit, without the term of the target. z is the scaled and
// capped logit.
template <typename T>
__device__ __forceinline__ float logit_gradient(const CrossEntropyParams& p,
                                                const RowGradient<float>& row, float z) {
  return row.of_logit(z, loss_exp<T>(z - row.shift), p.scale);
}

}  // namespace torchweld
