// Registers an op: its kernels for every dispatch key, its handle, autograd and autocast. <op>.cpp
// defines <op>_meta, followed by TW_OP(<op>), then <op>_cpu and <op>_cuda, and registers them with
// define_op.
//
// For ops with a matmul, autocast casts all tensors to the autocast dtype, so the norm of
// layer_norm_linear reads a rounded x. softmax, causal_softmax, the pointwise ops and sums have no
// autocast kernel and keep their dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/check.h"

namespace torchweld {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the dispatcher's handle of torchweld::<name>. Store the handle in a function-local
// static.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  const std::string full = std::string("torchweld::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "").typed<Signature>();
}

// A function object that calls an op through the dispatcher; see TW_OP.
template <typename Op, typename Signature>
struct OpCall;

template <typename Op, typename Result, typename... Args>
struct OpCall<Op, Result(Args...)> {
  Result operator()(Args... args) const {
    static const auto op = find_op<Result(Args...)>(Op::kName);
    return op.call(std::forward<Args>(args)...);
  }
  // Calls the op below autograd, as the forward of an autograd Function must.
  Result below(Args... args) const {
    at::AutoDispatchBelowADInplaceOrView guard;
    return (*this)(std::forward<Args>(args)...);
  }
};

// Defines call_<op>, a function object with the signature of <op>_meta. <op>_meta is a function or
// a pointer to one.
#define TW_OP(op)                                                                              \
  constexpr struct op##_call : OpCall<op##_call, std::remove_pointer_t<decltype(op##_meta)>> { \
    static constexpr const char* kName = #op;                                                  \
  } call_##op {                                                                                \
  }

template <typename T>
bool needs_grad(const T&) {
  return false;
}
inline bool needs_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool needs_grad(const OptionalTensor& t) { return is_given(t) && needs_grad(*t); }

// Whether autograd must record the call.
template <typename... Args>
bool any_needs_grad(const Args&... args) {
  return at::GradMode::is_enabled() && (needs_grad(args) || ...);
}

template <typename T>
bool has_tangent(const T&) {
  return false;
}
inline bool has_tangent(const Tensor& t) {
  return t.defined() && t._fw_grad(/*level=*/0).defined();
}
inline bool has_tangent(const OptionalTensor& t) { return is_given(t) && has_tangent(*t); }

// Raises an error if a tensor has a forward-mode tangent. Forward mode is independent of grad mode,
// so calls that autograd does not record are checked too; otherwise they would drop the tangent.
template <typename... Args>
void check_no_tangent(const char* op, const Args&... args) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(args) || ...), "torchweld::", op,
                              ": its tensors must have no forward-mode tangent, but one does; use "
                              "reverse mode, such as torch.autograd.grad or torch.func.jacrev");
}

// Converts an undefined tensor back to nullopt. Autograd returns an undefined tensor if nullopt was
// saved.
inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}
inline Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

// A backward op returns a (0,) tensor for a gradient that is not needed. Autograd needs an
// undefined tensor instead.
inline Tensor if_wanted(bool wanted, const Tensor& grad) { return wanted ? grad : Tensor(); }

// The CUDA kernel of an op that has none in this build: it raises an error and does not fall back
// to another device.
void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

inline torch::CppFunction no_cuda_kernel_function() {
  return torch::CppFunction::makeFromBoxedFunction<&no_cuda_kernel>();
}

// The Autograd kernel of an op without a gradient: backpropagating through the op raises an error.
inline torch::CppFunction no_gradient_function() {
  return torch::autograd::autogradNotImplementedFallback();
}

// Marks all outputs of a Function except the first as non-differentiable, because only the backward
// reads them.
inline variable_list outputs_of(AutogradContext* ctx, variable_list outputs) {
  ctx->mark_non_differentiable({outputs.begin() + 1, outputs.end()});
  ctx->set_materialize_grads(false);
  return outputs;
}

// Converts the first outputs of a Function to the result type of the op.
template <typename Result>
Result first_outputs(const variable_list& outputs) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return outputs[0];
  } else {
    Result result;
    std::apply([&, i = 0](auto&... t) mutable { ((t = outputs[i++]), ...); }, result);
    return result;
  }
}

// Clears the list of non-differentiable outputs of a node, because compiled autograd asserts that
// it is empty. Only apply() reads the list.
template <typename Function>
void clear_non_differentiable(const Tensor& output) {
  using Node = torch::autograd::CppNode<Function>;
  if (auto* node = dynamic_cast<Node*>(output.grad_fn().get())) {
    node->ctx_.mark_non_differentiable({});
  }
}
template <typename Function>
void clear_non_differentiable(const variable_list& outputs) {
  for (const Tensor& output : outputs) clear_non_differentiable<Function>(output);
}

// The Autograd kernel of an op that is differentiated by Function. A recorded call applies
// Function, any other call dispatches below autograd. `check(name, args...)` runs before Function,
// so that errors name this op and not the <op>_forward that Function calls.
template <typename Function, typename Op, typename Result, typename... Args, typename Check>
torch::CppFunction recorded_by(const OpCall<Op, Result(Args...)>&, Check check) {
  return torch::CppFunction([check](Args... args) -> Result {
    check_no_tangent(Op::kName, args...);
    if (any_needs_grad(args...)) {
      check(Op::kName, args...);
      const auto outputs = Function::apply(args...);
      clear_non_differentiable<Function>(outputs);
      if constexpr (std::is_same_v<decltype(outputs), const Tensor>) {
        return outputs;
      } else {
        return first_outputs<Result>(outputs);
      }
    }
    return Op().below(std::forward<Args>(args)...);
  });
}
template <typename Function, typename Op>
torch::CppFunction recorded_by(const Op& call) {
  return recorded_by<Function>(call, [](const auto&...) {});
}

// The autograd Function of an op with two tensors. Its backward op has the signature backward(dy,
// a, b) or backward(dy, a, b, output_mask).
template <typename Call, typename BackwardCall>
struct FunctionOfTwo : torch::autograd::Function<FunctionOfTwo<Call, BackwardCall>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    ctx->save_for_backward({a, b});
    return Call().below(a, b);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    using Mask = std::array<bool, 2>;
    const auto saved = ctx->get_saved_variables();
    if constexpr (std::is_invocable_v<BackwardCall, Tensor, Tensor, Tensor, Mask>) {
      const Mask wanted = {saved[0].requires_grad(), saved[1].requires_grad()};
      auto [da, db] = BackwardCall()(grads[0], saved[0], saved[1], wanted);
      return {if_wanted(wanted[0], da), if_wanted(wanted[1], db)};
    } else {
      auto [da, db] = BackwardCall()(grads[0], saved[0], saved[1]);
      return {da, db};
    }
  }
};

// These functions are defined in a .cpp file, because torch's autocast header includes every
// operator.
c10::DispatchKey autocast_key(at::DeviceType device);
at::ScalarType autocast_dtype(at::DeviceType device);
Tensor autocast_cast(const Tensor& t, at::ScalarType dtype, at::DeviceType device);

// A function object that casts floating-point tensors to the autocast dtype and returns other
// arguments unchanged. Autocast is off during its lifetime.
template <at::DeviceType device>
struct Autocast {
  c10::impl::ExcludeDispatchKeyGuard off{c10::DispatchKeySet(autocast_key(device))};
  at::ScalarType dtype = autocast_dtype(device);

  Tensor operator()(const Tensor& t) const { return autocast_cast(t, dtype, device); }
  OptionalTensor operator()(const OptionalTensor& t) const {
    return is_given(t) ? OptionalTensor((*this)(*t)) : std::nullopt;
  }
  template <typename T>
  const T& operator()(const T& other) const {
    return other;
  }
};

// The autocast kernel of an op: it casts all tensors of the call.
template <at::DeviceType device, typename Op, typename Result, typename... Args>
torch::CppFunction autocast_kernel(const OpCall<Op, Result(Args...)>&) {
  return torch::CppFunction([](Args... args) -> Result {
    const Autocast<device> cast;
    return Op()(cast(args)...);
  });
}
template <typename Op>
void define_autocast(torch::Library& m, const Op& call) {
  m.impl(Op::kName,
         torch::dispatch(c10::DispatchKey::AutocastCPU, autocast_kernel<at::kCPU>(call)));
  m.impl(Op::kName,
         torch::dispatch(c10::DispatchKey::AutocastCUDA, autocast_kernel<at::kCUDA>(call)));
}

// The kernels of an op. TW_KERNELS(softmax) lists softmax_meta, softmax_cpu and softmax_cuda.
struct Kernels {
  torch::CppFunction meta, cpu, cuda;
};

#ifdef TORCHWELD_CUDA
#define TW_CUDA_KERNEL(function) torch::CppFunction(function)
#else
#define TW_CUDA_KERNEL(function) no_cuda_kernel_function()
#endif
#define TW_KERNELS(op) \
  Kernels { torch::CppFunction(op##_meta), torch::CppFunction(op##_cpu), TW_CUDA_KERNEL(op##_cuda) }

// Registers the schema of an op, its kernels and its Autograd kernel.
void define_op(torch::Library& m, const std::string& schema, Kernels kernels,
               torch::CppFunction autograd);

}  // namespace torchweld
