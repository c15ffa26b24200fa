// The gradient of a gate on registers of any dtype.
#pragma once

#include "device/activation.cuh"
#include "device/vec.cuh"

namespace torchweld {

// Overwrites `left` and `right`, the operands of y = gate(left, right), by their gradients, and dy
// by y.
template <typename T, int kCount>
__device__ __forceinline__ void gate_grad_of(T (&left)[kCount], T (&right)[kCount], T (&dy)[kCount],
                                             Gate gate) {
  float r_left[kCount], r_right[kCount], r_dy[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    r_left[j] = to_float(left[j]);
    r_right[j] = to_float(right[j]);
    r_dy[j] = to_float(dy[j]);
  }
  gate_grad</*kExact=*/sizeof(T) == 4>(r_left, r_right, r_dy, gate);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    left[j] = from_float<T>(r_left[j]);
    right[j] = from_float<T>(r_right[j]);
    dy[j] = from_float<T>(r_dy[j]);
  }
}

}  // namespace torchweld
