// Two sums at a time over the threads that share a row.
#pragma once

#include "device/reduce.cuh"

namespace torchweld {

__device__ __forceinline__ float2 warp_sum(float2 x) {
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

// Joins the warps of a block; every thread gets the result, the same bits in every run. One
// PairExchange serves one call.
template <int kThreads>
struct PairExchange {
  float2 s_parts[kThreads / kWarp];

  __device__ __forceinline__ float2 sum_warps(float2 x) {
    if (threadIdx.x % kWarp == 0) s_parts[threadIdx.x / kWarp] = x;
    __syncthreads();
    float2 sum = s_parts[0];
#pragma unroll
    for (int w = 1; w < kThreads / kWarp; ++w) {
      sum.x += s_parts[w].x;
      sum.y += s_parts[w].y;
    }
    return sum;
  }
};

}  // namespace torchweld
