// Reductions over the threads that share a row: the threads of a warp or of a whole block.
#pragma once

#include <cmath>

#include "device/named_barrier.cuh"

namespace torchweld {

constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float2 warp_sum(float2 x) {
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

// Returns 2^x with an error of at most 2 ulp, even if the result is subnormal.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 2^x, computed in one instruction. A subnormal result becomes 0.
__device__ __forceinline__ float exp2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// min(x, y), or NaN if x or y is NaN.
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The state of an online softmax over values x. `max` is the maximum of the values so far, and
// `sum` is the sum of 2^((x - max) * c) over these values. c is the scale of the exponent.
struct MaxSum {
  float max;
  float sum;
};

// Returns partial.sum, rescaled from the maximum partial.max to `max`. `max` must be at least
// partial.max. The factor is exponent.rescale(partial.max, max). A sum of 0 stays 0, even if the
// scale of the exponent is 0.
template <typename Exponent>
__device__ __forceinline__ float rescaled_sum(MaxSum partial, float max, const Exponent& exponent) {
  return partial.sum == 0.f ? 0.f : partial.sum * exponent.rescale(partial.max, max);
}

template <typename Exponent>
__device__ __forceinline__ MaxSum warp_merge(MaxSum x, const Exponent& exponent) {
  const float max = warp_max(x.max);
  return {max, warp_sum(rescaled_sum(x, max, exponent))};
}

// If kGroups is 0, reduces one value per warp over a block of at most kThreads threads. If kGroups
// > 0, the block has kGroups groups of kThreads threads. Each group then reduces its own values and
// has its own barrier. Every thread receives the result. The result has the same bits in every run.
// Consecutive calls must not use the same object, so a loop must alternate between two objects.
template <int kThreads, int kGroups = 0>
struct BlockExchange {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);
  float2 s_partials[kWarps];

  template <typename Exponent>
  __device__ __forceinline__ MaxSum merge_warps(MaxSum x, const Exponent& exponent) {
    publish(make_float2(x.max, x.sum), make_float2(-INFINITY, 0.f));
    if constexpr (kWarps > kFewWarps) {
      const float2 partial = lane_partial(make_float2(-INFINITY, 0.f));
      return warp_merge({partial.x, partial.y}, exponent);
    }
    float max = s_partials[0].x;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, s_partials[w].x);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      sum += rescaled_sum({s_partials[w].x, s_partials[w].y}, max, exponent);
    return {max, sum};
  }

  __device__ __forceinline__ float sum_warps(float x) {
    publish(make_float2(x, 0.f), make_float2(0.f, 0.f));
    if constexpr (kWarps > kFewWarps) return warp_sum(lane_partial(make_float2(0.f, 0.f)).x);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += s_partials[w].x;
    return sum;
  }

 private:
  // If there are at most kFewWarps partial results, every thread reads all of them, because these
  // reads are faster than five shuffles.
  static constexpr int kFewWarps = 8;

  __device__ __forceinline__ void publish(float2 value, float2 neutral) {
    const unsigned warp = (kGroups < 2 ? threadIdx.x : threadIdx.x % kThreads) / kWarp;
    if (threadIdx.x % kWarp == 0) s_partials[warp] = value;
    if constexpr (kGroups == 0) {
      const unsigned warps = blockDim.x / kWarp;
      if (threadIdx.x >= warps && threadIdx.x < kWarps) s_partials[threadIdx.x] = neutral;
      __syncthreads();
    } else {
      sync_group(threadIdx.x / kThreads);
    }
  }
  template <int kGroup = 0>
  static __device__ __forceinline__ void sync_group(unsigned group) {
    if constexpr (kGroup + 1 < kGroups) {
      if (group != kGroup) return sync_group<kGroup + 1>(group);
    }
    named_barrier_wait<1 + kGroup, kThreads>();
  }
  __device__ __forceinline__ float2 lane_partial(float2 neutral) const {
    const int lane = threadIdx.x % kWarp;
    return lane < kWarps ? s_partials[lane] : neutral;
  }
};

// Each warp passes two values. Computes the sum of each value over the warps of a block of kThreads
// threads. Every thread receives both sums. The sums have the same bits in every run. An object may
// be used for one call only.
template <int kThreads>
struct PairExchange {
  float2 s_partials[kThreads / kWarp];

  __device__ __forceinline__ float2 sum_warps(float2 x) {
    if (threadIdx.x % kWarp == 0) s_partials[threadIdx.x / kWarp] = x;
    __syncthreads();
    float2 sum = s_partials[0];
#pragma unroll
    for (int w = 1; w < kThreads / kWarp; ++w) {
      sum.x += s_partials[w].x;
      sum.y += s_partials[w].y;
    }
    return sum;
  }
};

}  // namespace torchweld
