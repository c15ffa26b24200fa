// The pointwise functions of the linear ops and their derivatives, in fp32. kExact asks for
// fp32-accurate exponentials and divisions; results that are rounded to 16 bits do without.
#pragma once

#include <cmath>

#include "core/pointwise.h"
#include "device/reduce.cuh"

namespace torchweld {

// 1 / (1 + e^-x), relative accuracy everywhere.
template <bool kExact>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (kExact) return 1.f / (1.f + expf(-x));
  constexpr float kLog2e = 1.4426950408889634f;
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + exp2_approx_ftz(-x * kLog2e)));
  return y;
}

// NOTE: x < 0, not x > 0, so that NaN stays NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

__device__ __forceinline__ float gelu(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  return 0.5f * x * (1.f + erff(x * kSqrtHalf));
}

// gelu_tanh(x) = x * sigmoid(2u): 1 + tanh(u) without its cancellation at negative u.
__device__ __forceinline__ float gelu_tanh_argument(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  return kTwoSqrt2OverPi * (x + 0.044715f * x * x * x);
}

template <bool kExact>
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * sigmoid<kExact>(gelu_tanh_argument(x));
}

template <bool kExact>
__device__ __forceinline__ float silu(float x) {
  return x * sigmoid<kExact>(x);
}

__device__ __forceinline__ float gelu_slope(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  constexpr float kDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)
  return 0.5f * (1.f + erff(x * kSqrtHalf)) + x * (expf(-0.5f * x * x) * kDensity);
}

template <bool kExact>
__device__ __forceinline__ float gelu_tanh_slope(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  const float s = sigmoid<kExact>(gelu_tanh_argument(x));
  return s + x * s * (1.f - s) * kTwoSqrt2OverPi * (1.f + 3.f * 0.044715f * x * x);
}

template <bool kExact>
__device__ __forceinline__ float silu_slope(float x) {
  const float s = sigmoid<kExact>(x);
  return s * (1.f + x * (1.f - s));
}

template <bool kExact>
__device__ __forceinline__ float activate(float z, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return relu(z);
    case Activation::kGelu:
      return gelu(z);
    case Activation::kGeluTanh:
      return gelu_tanh<kExact>(z);
    case Activation::kSilu:
      return silu<kExact>(z);
    default:
      return z;
  }
}

// dy * activation'(z); for relu z may be y itself.
template <bool kExact>
__device__ __forceinline__ float activation_grad(float dy, float z, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return z <= 0.f ? 0.f : dy;
    case Activation::kGelu:
      return dy * gelu_slope(z);
    case Activation::kGeluTanh:
      return dy * gelu_tanh_slope<kExact>(z);
    case Activation::kSilu:
      return dy * silu_slope<kExact>(z);
    default:
      return dy;
  }
}

template <bool kExact>
__device__ __forceinline__ float apply_gate(float left, float right, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh:
      return sigmoid<kExact>(left) * tanhf(right);
    case Gate::kGeglu:
      return left * gelu(right);
    case Gate::kGegluTanh:
      return left * gelu_tanh<kExact>(right);
    case Gate::kSwiglu:
      return silu<kExact>(left) * right;
    default:
      return left * relu(right);
  }
}

struct GateGrad {
  float left, right;
};

template <bool kExact>
__device__ __forceinline__ GateGrad gate_grad(float dy, float left, float right, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh: {
      const float s = sigmoid<kExact>(left), t = tanhf(right);
      return {dy * t * s * (1.f - s), dy * s * (1.f - t * t)};
    }
    case Gate::kGeglu:
      return {dy * gelu(right), dy * left * gelu_slope(right)};
    case Gate::kGegluTanh:
      return {dy * gelu_tanh<kExact>(right), dy * left * gelu_tanh_slope<kExact>(right)};
    case Gate::kSwiglu:
      return {dy * right * silu_slope<kExact>(left), dy * silu<kExact>(left)};
    default:
      return {dy * relu(right), right <= 0.f ? 0.f : dy * left};
  }
}

}  // namespace torchweld
