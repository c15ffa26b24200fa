// The gradient of a gate. The operands are values of any dtype in registers.
#pragma once

#include "device/activation.cuh"
#include "device/vec.cuh"

namespace torchweld {

// left and right are the operands of y = gate(left, right). The function overwrites left with its
// gradient, right with its gradient, and dy with y.
template <typename T, int kCount>
__device__ __forceinline__ void gate_grad_of(T (&left)[kCount], T (&right)[kCount], T (&dy)[kCount],
                                             Gate gate) {
  // NOTE: the loop converts kPart values to fp32 at a time. The fp32 values of a whole access would
  // need more registers than an A100 has.
  constexpr int kPart = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int first = 0; first < kCount; first += kPart) {
    float r_left[kPart], r_right[kPart], r_dy[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      r_left[j] = to_float(left[first + j]);
      r_right[j] = to_float(right[first + j]);
      r_dy[j] = to_float(dy[first + j]);
    }
    gate_grad</*kExact=*/sizeof(T) == 4>(r_left, r_right, r_dy, gate);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      left[first + j] = from_float<T>(r_left[j]);
      right[first + j] = from_float<T>(r_right[j]);
      dy[first + j] = from_float<T>(r_dy[j]);
    }
  }
}

}  // namespace torchweld
