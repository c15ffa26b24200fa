// The activations and the gates of the linear ops, and the derivatives of both, in fp32. If kExact
// is true, exponentials and divisions have fp32 accuracy. A caller that rounds the result to 16
// bits does not need this accuracy.
#pragma once

#include <cmath>

#include "core/activation_kind.h"
#include "device/reduce.cuh"

namespace torchweld {

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 / (1 + 2^x). The relative error is small for every x.
__device__ __forceinline__ float one_over_one_plus_exp2(float x) {
  return reciprocal_approx(1.f + exp2_approx_ftz(x));
}

// Returns 1 / (1 + e^-x). The relative error is small for every x.
template <bool kExact>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (kExact) return 1.f / (1.f + expf(-x));
  return one_over_one_plus_exp2(x * -kLog2e);
}

// NOTE: the condition must be x < 0. With x > 0 ? x : 0, the result for NaN would be 0 instead of
// NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

// gelu(x) = x Phi(x) = max(x, 0) - |x| Phi(-|x|), where Phi is the normal distribution function.
// Phi(-|x|) is computed as e^(-x^2 / 2) times a polynomial in 1 / (1 + 0.37 |x|). The coefficients
// were fitted so that the relative error is below 2^-15.
// Source: the form is 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions".
template <bool kExact>
__device__ __forceinline__ float gelu(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  if constexpr (kExact) return 0.5f * x * (1.f + erff(x * kSqrtHalf));
  const float t = reciprocal_approx(fmaf(0.37f, fabsf(x), 1.f));
  float tail = fmaf(t, -0.09303307f, 0.21614292f);
  tail = fmaf(t, tail, 0.07108873f);
  tail = fmaf(t, tail, 0.15906724f);
  tail = fmaf(t, tail, 0.14672485f) * t;
  tail *= exp2_approx_ftz(x * x * (-0.5f * kLog2e));
  // NOTE: without fminf, the result for x = inf would be NaN, because inf * 0 is NaN. With fminf,
  // the result for inf is inf. The results for -inf and NaN are NaN, as in torch.
  return fmaf(-fmaxf(-x, fminf(x, 16.f)), tail, relu(x));
}

// Returns 2u, where u = sqrt(2 / pi) * (x + 0.044715 x^3) and gelu_tanh(x) = x * sigmoid(2u). The
// usual formula x / 2 * (1 + tanh(u)) has the same value, but 1 + tanh(u) loses digits if u is
// negative.
__device__ __forceinline__ float gelu_tanh_argument(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  return kTwoSqrt2OverPi * (x + 0.044715f * x * x * x);
}

template <bool kExact>
__device__ __forceinline__ float gelu_tanh(float x) {
  if constexpr (kExact) return x * sigmoid<kExact>(gelu_tanh_argument(x));
  constexpr float kLinear = -1.5957691216057308f * kLog2e, kCubic = kLinear * 0.044715f;
  return x * one_over_one_plus_exp2(x * fmaf(x * x, kCubic, kLinear));
}

// Computes tanh(x) = 2 sigmoid(2x) - 1. If x is near 0, this difference would lose digits, so the
// function returns the first two terms of the Taylor series instead.
template <bool kExact>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (kExact) return tanhf(x);
  const float series = x - x * x * x * (1.f / 3.f);
  return fabsf(x) < 0.03f ? series : fmaf(2.f, sigmoid<kExact>(2.f * x), -1.f);
}

template <bool kExact>
__device__ __forceinline__ float silu(float x) {
  return x * sigmoid<kExact>(x);
}

// Computes sigmoid(x) and 1 - sigmoid(x). The relative error of both values is small.
template <bool kExact>
struct Sigmoids {
  float of_x, complement;
  __device__ __forceinline__ explicit Sigmoids(float x) {
    const float e = kExact ? expf(-fabsf(x)) : exp2_approx_ftz(fabsf(x) * -kLog2e);
    const float larger = kExact ? 1.f / (1.f + e) : reciprocal_approx(1.f + e);
    const float smaller = e * larger;
    of_x = x < 0.f ? smaller : larger;
    complement = x < 0.f ? larger : smaller;
  }
};

struct ValueAndSlope {
  float value, slope;
};

// gelu'(x) = Phi(x) + x Phi'(x). The polynomial has one more term than that of gelu(), and a
// relative error below 2^-18: where the slope is near 0, it is a difference of larger numbers.
template <bool kExact>
__device__ __forceinline__ ValueAndSlope gelu_and_slope(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  constexpr float kDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)
  if constexpr (kExact) {
    const float phi = 0.5f * (1.f + erff(x * kSqrtHalf));
    return {x * phi, phi + x * (expf(-0.5f * x * x) * kDensity)};
  }
  const float t = reciprocal_approx(fmaf(0.3f, fabsf(x), 1.f));
  float tail = fmaf(t, -0.08183882f, 0.23059093f);
  tail = fmaf(t, tail, -0.03404331f);
  tail = fmaf(t, tail, 0.15375424f);
  tail = fmaf(t, tail, 0.11120962f);
  tail = fmaf(t, tail, 0.12032781f) * t;
  const float e = exp2_approx_ftz(x * x * (-0.5f * kLog2e));
  return {fmaf(-fmaxf(-x, fminf(x, 16.f)), tail * e, relu(x)),
          fmaf(e, fmaf(x, kDensity, x < 0.f ? tail : -tail), x < 0.f ? 0.f : 1.f)};
}

template <bool kExact>
__device__ __forceinline__ ValueAndSlope gelu_tanh_and_slope(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  const Sigmoids<kExact> s(gelu_tanh_argument(x));
  const float argument_slope = kTwoSqrt2OverPi * (1.f + 3.f * 0.044715f * x * x);
  return {x * s.of_x, s.of_x * (1.f + x * s.complement * argument_slope)};
}

template <bool kExact>
__device__ __forceinline__ ValueAndSlope silu_and_slope(float x) {
  const Sigmoids<kExact> s(x);
  return {x * s.of_x, s.of_x * (1.f + x * s.complement)};
}

// NOTE: the switch is outside of the loop over the values. A switch in the loop would cost more
// than the activation itself.
template <bool kExact, int kCount>
__device__ __forceinline__ void activate(float (&z)[kCount], Activation activation) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = f(z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return each([](float x) { return relu(x); });
    case Activation::kGelu:
      return each([](float x) { return gelu<kExact>(x); });
    case Activation::kGeluTanh:
      return each([](float x) { return gelu_tanh<kExact>(x); });
    case Activation::kSilu:
      return each([](float x) { return silu<kExact>(x); });
    case Activation::kReluSquared:
      return each([](float x) { return relu(x) * relu(x); });
  }
}

// Computes dy *= activation'(z). For relu, the caller may pass y = relu(z) instead of z, because y
// is positive exactly if z is positive.
template <bool kExact, int kCount>
__device__ __forceinline__ void activation_grad(float (&dy)[kCount], const float (&z)[kCount],
                                                Activation activation) {
  const auto each = [&](auto slope) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy[i] *= slope(z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) dy[i] = z[i] <= 0.f ? 0.f : dy[i];
      return;
    case Activation::kGelu:
      return each([](float x) { return gelu_and_slope<kExact>(x).slope; });
    case Activation::kGeluTanh:
      return each([](float x) { return gelu_tanh_and_slope<kExact>(x).slope; });
    case Activation::kSilu:
      return each([](float x) { return silu_and_slope<kExact>(x).slope; });
    case Activation::kReluSquared:
#pragma unroll
      for (int i = 0; i < kCount; ++i) dy[i] = z[i] <= 0.f ? 0.f : dy[i] * (2.f * z[i]);
      return;
  }
}

// Computes left = gate(left, right).
template <bool kExact, int kCount>
__device__ __forceinline__ void apply_gate(float (&left)[kCount], const float (&right)[kCount],
                                           Gate gate) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) left[i] = f(left[i], right[i]);
  };
  switch (gate) {
    case Gate::kSigmoidTanh:
      return each([](float l, float r) { return sigmoid<kExact>(l) * tanh_of<kExact>(r); });
    case Gate::kGeglu:
      return each([](float l, float r) { return l * gelu<kExact>(r); });
    case Gate::kGegluTanh:
      return each([](float l, float r) { return l * gelu_tanh<kExact>(r); });
    case Gate::kSwiglu:
      return each([](float l, float r) { return silu<kExact>(l) * r; });
    case Gate::kReglu:
      return each([](float l, float r) { return l * relu(r); });
  }
}

// dy is the gradient with respect to gate(left, right). Overwrites `left` and `right` with the
// gradients with respect to them, and dy with gate(left, right).
template <bool kExact, int kCount>
__device__ __forceinline__ void gate_grad(float (&left)[kCount], float (&right)[kCount],
                                          float (&dy)[kCount], Gate gate) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy[i] = f(left[i], right[i], dy[i]);
  };
  switch (gate) {
    case Gate::kSigmoidTanh:
      return each([](float& l, float& r, float d) {
        const Sigmoids<kExact> s(l);
        const float t = tanh_of<kExact>(r);
        l = d * t * s.of_x * s.complement;
        r = d * s.of_x * (1.f - t) * (1.f + t);
        return s.of_x * t;
      });
    case Gate::kGeglu:
      return each([](float& l, float& r, float d) {
        const ValueAndSlope gelu = gelu_and_slope<kExact>(r);
        const float y = l * gelu.value;
        r = d * l * gelu.slope;
        l = d * gelu.value;
        return y;
      });
    case Gate::kGegluTanh:
      return each([](float& l, float& r, float d) {
        const ValueAndSlope gelu = gelu_tanh_and_slope<kExact>(r);
        const float y = l * gelu.value;
        r = d * l * gelu.slope;
        l = d * gelu.value;
        return y;
      });
    case Gate::kSwiglu:
      return each([](float& l, float& r, float d) {
        const ValueAndSlope silu = silu_and_slope<kExact>(l);
        const float y = silu.value * r;
        l = d * r * silu.slope;
        r = d * silu.value;
        return y;
      });
    case Gate::kReglu:
      return each([](float& l, float& r, float d) {
        const float slope = r <= 0.f ? 0.f : d * l, value = relu(r), y = l * value;
        l = d * value;
        r = slope;
        return y;
      });
  }
}

}  // namespace torchweld
