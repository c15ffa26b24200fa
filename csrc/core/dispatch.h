// What every room registers the same way: handles to ops, autograd and autocast plumbing.
//
// Autocast casts the tensors of matmul-like ops to the autocast dtype, x included, so that the norm
// of layer_norm_linear reads a rounded x. softmax, causal_softmax, the pointwise ops and sums have
// no autocast kernel and keep their dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "core/check.h"

namespace torchweld {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The dispatcher's handle of torchweld::<name>; keep it in a function-local static.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  const std::string full = std::string("torchweld::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "").typed<Signature>();
}

inline bool needs_grad(const Tensor& t) {
  return t.defined() && (t.requires_grad() || t._fw_grad(/*level=*/0).defined());
}
inline bool needs_grad(const OptionalTensor& t) { return is_given(t) && needs_grad(*t); }

// True where a call must be recorded. Forward-mode gradients count, so that they are refused by
// autograd's own message instead of being dropped.
template <typename... Tensors>
bool any_needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (needs_grad(tensors) || ...);
}

// A saved optional tensor comes back undefined; ops take it as nullopt.
inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}
inline Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

// Backward ops return a (0,) tensor for a gradient nobody asked for; autograd wants it undefined.
inline Tensor if_wanted(bool wanted, const Tensor& grad) { return wanted ? grad : Tensor(); }

// Registered for CUDA by each op that has no CUDA kernel in this build: one sentence, no fallback.
void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

inline torch::CppFunction no_cuda_kernel_function() {
  return torch::CppFunction::makeFromBoxedFunction<&no_cuda_kernel>();
}

// Registered for Autograd by ops without a gradient: backpropagating through them raises.
inline torch::CppFunction no_gradient_function() {
  return torch::autograd::autogradNotImplementedFallback();
}

// What Autocast asks torch; out of line, because torch's header of it includes every operator.
c10::DispatchKey autocast_key(at::DeviceType device);
at::ScalarType autocast_dtype(at::DeviceType device);
Tensor autocast_cast(const Tensor& t, at::ScalarType dtype, at::DeviceType device);

// Autocast. Inside the guard the op runs as if autocast were off.
template <at::DeviceType device>
struct Autocast {
  c10::impl::ExcludeDispatchKeyGuard off{c10::DispatchKeySet(autocast_key(device))};
  at::ScalarType dtype = autocast_dtype(device);

  Tensor operator()(const Tensor& t) const { return autocast_cast(t, dtype, device); }
  OptionalTensor operator()(const OptionalTensor& t) const {
    return is_given(t) ? OptionalTensor((*this)(*t)) : std::nullopt;
  }
};

}  // namespace torchweld
