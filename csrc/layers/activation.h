// The activations of the linear ops: their names, and their CPU implementation.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <string_view>

#include "core/activation_kind.h"
#include "core/batch_invariance.h"
#include "core/check.h"
#include "core/linear_common.h"
#include "core/parallel.h"
#include "layers/donation.h"
#include "layers/gelu_tanh_cpu.h"

namespace torchweld {

inline Activation parse_activation(const char* op, std::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  if (name == "relu_squared") return Activation::kReluSquared;
  TW_CHECK(false, op,
           "activation must be one of none, relu, gelu, gelu_tanh, silu, relu_squared, but got '",
           name, "'");
}

// Whether the gradient of the activation is computed from the pre-activation z. The gradient of
// relu is computed from y instead, and the gradient of kNone needs neither z nor y.
inline bool saves_preact(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kRelu;
}

// Whether the backward op receives a tensor `preact`. The tensor is y for relu, and z for other
// activations.
inline bool needs_preact(Activation activation) { return activation != Activation::kNone; }

// Checks `preact`. `sizes` is the shape of y, which `preact` must have.
inline void check_preact(const char* op, const OptionalTensor& preact, Activation activation,
                         c10::SymIntArrayRef sizes, const Tensor& x) {
  if (!needs_preact(activation)) return;
  TW_CHECK(
      is_given(preact), op,
      "preact must be the pre-activation (y for relu) that the forward op saved, but got None");
  check_like(op, "preact", *preact, "x", x);
  check_shape(op, "preact", *preact, sizes, "(..., N)");
}

// Computes y = activation(z). y may be z itself.
inline void activate_elements(Tensor y, const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      if (!y.is_same(z)) y.copy_(z);
      break;
    case Activation::kRelu:
      at::relu_out(y, z);
      break;
    case Activation::kGelu:
      at::gelu_out(y, z, "none");
      break;
    case Activation::kGeluTanh:
      if (!supports_gelu_tanh(y, z)) {
        at::gelu_out(y, z, "tanh");
      } else if (y.scalar_type() == at::kFloat) {
        gelu_tanh_into<float>(y, z);
      } else {
        gelu_tanh_into<at::BFloat16>(y, z);
      }
      break;
    case Activation::kSilu:
      at::silu_out(y, z);
      break;
    case Activation::kReluSquared:
      at::relu_out(y, z);
      y.mul_(y);
      break;
  }
}

// Computes y = activation(z) for contiguous tensors (..., N). y may be z itself.
// NOTE: torch, and loops that the compiler vectorises, compute the last elements of a tensor by
// other code than the others. In the batch-invariant mode, each row is therefore a tensor of its
// own.
inline void activate_into(Tensor& y, const Tensor& z, Activation activation) {
  if (!is_batch_invariant() || activation == Activation::kNone) {
    return activate_elements(y, z, activation);
  }
  const Tensor to = as_matrix(y), from = as_matrix(z);
  parallel_tasks(to.size(0), [&](int64_t row) {
    activate_elements(to.narrow(0, row, 1), from.narrow(0, row, 1), activation);
  });
}

// Computes dz = dy * activation'(z). `preact` is y for relu, and z for other activations.
inline void activation_backward_elements(Tensor dz, const Tensor& dy, const Tensor& preact,
                                         Activation activation) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      at::threshold_backward_out(dz, dy, preact, 0);
      break;
    case Activation::kGelu:
      at::gelu_backward_out(dz, dy, preact, "none");
      break;
    case Activation::kGeluTanh:
      if (!supports_gelu_tanh(dy, preact)) {
        at::gelu_backward_out(dz, dy, preact, "tanh");
      } else if (dy.scalar_type() == at::kFloat) {
        gelu_tanh_backward_into<float>(dz, dy, preact);
      } else {
        gelu_tanh_backward_into<at::BFloat16>(dz, dy, preact);
      }
      break;
    case Activation::kSilu:
      at::silu_backward_out(dz, dy, preact);
      break;
    case Activation::kReluSquared:
      // NOTE: dz may be `preact`, so only the last use of `preact` writes to dz.
      at::threshold_backward_out(dz, at::mul(dy, preact), preact, 0);
      dz.mul_(2);
      break;
  }
}

// Returns dz = dy * activation'(z), or dy itself without an activation. `preact` is y for relu, and
// z for other activations. If it is donated (layers/donation.h), dz overwrites it.
inline Tensor activation_backward(const Tensor& dy, const OptionalTensor& preact,
                                  Activation activation) {
  if (activation == Activation::kNone) return dy;
  const Tensor& z = *preact;
  if (!is_batch_invariant()) {
    const Tensor dz = Donation::over(z);
    activation_backward_elements(dz, dy, z, activation);
    return dz;
  }
  const Tensor dz = z.is_contiguous() ? Donation::over(z) : at::empty(z.sizes(), z.options());
  const Tensor to = as_matrix(dz), from = as_matrix(dy), of = as_matrix(z);
  parallel_tasks(to.size(0), [&](int64_t row) {
    const auto row_of = [&](const Tensor& t) { return t.narrow(0, row, 1); };
    activation_backward_elements(row_of(to), row_of(from), row_of(of), activation);
  });
  return dz;
}

}  // namespace torchweld
