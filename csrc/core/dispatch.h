// Helpers to register an op: its kernels for every dispatch key, its handle, its autograd and its
// autocast kernels. The file <op>.cpp first defines the function <op>_meta, then writes
// TW_OP(<op>), then defines <op>_cpu and <op>_cuda. At its end the file registers the op with
// define_op.
//
// If an op has a matmul, its autocast kernel casts all tensors to the autocast dtype. For example,
// the norm in layer_norm_linear reads an x that is rounded to this dtype. softmax, causal_softmax,
// the pointwise ops and the sums have no autocast kernel, so they compute in the dtype of their
// inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/batch_invariance.h"
#include "core/check.h"

namespace torchweld {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the dispatcher's handle of the op torchweld::<name>. The caller should store the handle
// in a static local variable, because the lookup is slow.
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
  // Calls the op without autograd. The forward of an autograd Function must call an op in this way.
  Result below(Args... args) const {
    at::AutoDispatchBelowADInplaceOrView guard;
    return (*this)(std::forward<Args>(args)...);
  }
};

// An OpCall for an op whose name is a static member of a class: *kNameOf. Meta is the type of
// <op>_meta.
template <typename Meta, const char* const* kNameOf>
struct NamedOpCall : OpCall<NamedOpCall<Meta, kNameOf>, Meta> {
  static constexpr const char* kName = *kNameOf;
};

// Defines call_<op>, a function object that calls the op. It has the signature of <op>_meta, which
// is a function or a pointer to a function.
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
inline bool needs_grad(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& t) { return needs_grad(t); });
}

// A list of tensors that may be None. None is the same as an empty list.
// NOTE: AOTInductor passes None for an empty list.
using OptionalList = std::optional<at::TensorList>;

// Returns an argument of an op as autograd reads it: a list for an OptionalList.
template <typename T>
const T& plain(const T& argument) {
  return argument;
}
inline at::TensorList plain(const OptionalList& list) { return list.value_or(at::TensorList()); }

// Whether autograd must record a call with these arguments.
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
inline bool has_tangent(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& t) { return has_tangent(t); });
}

// Raises an error if a tensor has a forward-mode tangent. Every call must be checked, even one that
// autograd does not record: forward mode does not depend on grad mode, and the op would drop the
// tangent.
template <typename... Args>
void check_no_tangent(const char* op, const Args&... args) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(args) || ...), "torchweld::", op,
                              ": its tensors must have no forward-mode tangent, but one does; use "
                              "reverse mode, such as torch.autograd.grad or torch.func.jacrev");
}

// Converts an undefined tensor to nullopt. If a forward saves nullopt, autograd gives the backward
// an undefined tensor.
inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}
inline Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

// A backward op returns a (0,) tensor for a gradient that is not needed. Autograd needs an
// undefined tensor instead.
inline Tensor if_wanted(bool wanted, const Tensor& grad) { return wanted ? grad : Tensor(); }

// The CUDA kernel of an op in a build without CUDA kernels. It raises an error.
void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The kernel of an op of lists for a batch of gradients (torch.autograd.grad with
// is_grads_batched). It calls the op once for each entry of the batch. For other ops, torch does.
void for_each_of_batch(const c10::OperatorHandle& op, torch::jit::Stack* stack);

inline torch::CppFunction no_cuda_kernel_function() {
  return torch::CppFunction::makeFromBoxedFunction<&no_cuda_kernel>();
}

// Returns the Autograd kernel for ops that are not differentiable. Backpropagating through such an
// op raises an error.
inline torch::CppFunction no_gradient_function() {
  return torch::autograd::autogradNotImplementedFallback();
}

// Marks all outputs of an autograd Function as non-differentiable, except the first output. The
// other outputs exist only for the backward.
inline variable_list outputs_of(AutogradContext* ctx, variable_list outputs) {
  ctx->mark_non_differentiable({outputs.begin() + 1, outputs.end()});
  ctx->set_materialize_grads(false);
  return outputs;
}

// Converts the outputs of an autograd Function to the result type of the op. If the op returns a
// list, the list has all outputs. Otherwise the Function may have more outputs than the op; only
// the first ones are used.
template <typename Result>
Result first_outputs(const variable_list& outputs) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return outputs[0];
  } else if constexpr (std::is_same_v<Result, variable_list>) {
    return outputs;
  } else {
    Result result;
    std::apply([&, i = 0](auto&... t) mutable { ((t = outputs[i++]), ...); }, result);
    return result;
  }
}

// The last step of an autograd Function that saves its tensors before it computes its result.
// Activation checkpointing recomputes a region only until the last tensor of the region is saved.
// Therefore the recomputation skips this step if the op is the last one of the region.
//
// The forward of such a Function returns a placeholder as its first output, and finish(outputs,
// args...) computes the result. The gradient of the result is passed to the Function as the
// gradient of the placeholder.
struct FinishFunction : torch::autograd::Function<FinishFunction> {
  static Tensor forward(AutogradContext*, const Tensor& /*placeholder*/,
                        const std::function<Tensor()>& finish) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return finish();
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {grads[0], Tensor()};
  }
};

// Returns a placeholder for a result with the dtype and the device of x. The placeholder has memory
// for only one element.
inline Tensor placeholder(const Tensor& x, c10::SymIntArrayRef sizes) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return x.new_empty_symint(std::vector<c10::SymInt>(sizes.size(), 1)).expand_symint(sizes);
}

template <typename Function, typename = void>
struct Finishes : std::false_type {};
template <typename Function>
struct Finishes<Function, std::void_t<decltype(&Function::finish)>> : std::true_type {};

// A Function whose backward can be differentiated declares kTwice = true.
template <typename Function, typename = void>
struct Twice : std::false_type {};
template <typename Function>
struct Twice<Function, std::void_t<decltype(Function::kTwice)>> : std::true_type {};

// Tells a backward which gradients autograd asks for. next() is called once for each tensor
// argument of the forward, in order.
class AskedGradients {
 public:
  explicit AskedGradients(const AutogradContext* ctx) : ctx_(ctx) {}
  // An optional tensor that the caller has not given counts as no argument.
  bool next(bool given = true) { return given && ctx_->needs_input_grad(edge_++); }
  // Whether autograd asks for the gradient of any of the next `count` tensors.
  bool any_of_next(size_t count) {
    bool any = false;
    for (size_t i = 0; i < count; ++i) any |= next();
    return any;
  }

 private:
  const AutogradContext* ctx_;
  size_t edge_ = 0;
};

// Raises an error if a hook splits the backward of a node with several results.
// NOTE: a zero-bubble pipeline asks for the gradients of inputs and of weights in two passes. torch
// gives the second pass the sum of the gradients of all results, as the gradient of the first one.
void check_not_split(const char* op, const torch::autograd::Node& node, const variable_list& grads);

// Connects the gradients that a node has computed to all inputs of the node, so that a second
// derivative raises an error. A gradient may depend on an input that the backward does not read.
void refuse_second_derivative(const char* op, const torch::autograd::Node& node,
                              const variable_list& grads, variable_list& results);

// The autograd Function that records the op `Op`. It adds to F what holds for all ops: the backward
// of a batch-invariant forward is batch invariant, and a split backward or an unsupported second
// derivative raises an error.
template <typename F, typename Op>
struct Recorded : torch::autograd::Function<Recorded<F, Op>> {
  // `outputs` receives the outputs, so that release() can find the node.
  template <typename... Args>
  static auto forward(AutogradContext* ctx, variable_list* outputs, const Args&... args) {
    if (is_batch_invariant()) ctx->saved_data[kInvariant] = true;
    auto results = F::forward(ctx, args...);
    *outputs = {};
    if constexpr (std::is_same_v<decltype(results), Tensor>) {
      outputs->push_back(results);
    } else {
      *outputs = results;
    }
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto node = torch::autograd::get_current_node();
    if (node) check_not_split(Op::kName, *node, grads);
    const bool refuses = node && at::GradMode::is_enabled() && !Twice<F>::value;
    const at::AutoGradMode mode(at::GradMode::is_enabled() && !refuses);
    // The backward of a batch-invariant forward is batch invariant.
    const BatchInvariantScope invariant(is_batch_invariant() ||
                                        ctx->saved_data.count(kInvariant) > 0);
    variable_list results = F::backward(ctx, grads);
    if (refuses) refuse_second_derivative(Op::kName, *node, grads, results);
    results.emplace(results.begin());  // for `outputs`
    return results;
  }

  // Frees the tensors of a node whose forward has raised an error while it saved them.
  // Activation checkpointing stops a recomputation in this way.
  // NOTE: a node that saves its own output holds itself until its variables are saved.
  static void release(const variable_list& outputs) {
    for (const Tensor& output : outputs) {
      if (auto* node = node_of(output)) node->ctx_.save_for_backward({});
    }
  }

  // Clears the list of non-differentiable outputs. Compiled autograd asserts that this list is
  // empty. The list is no longer needed, because only apply() reads it.
  static void clear_non_differentiable(const variable_list& outputs) {
    for (const Tensor& output : outputs) {
      if (auto* node = node_of(output)) node->ctx_.mark_non_differentiable({});
    }
  }

 private:
  static constexpr const char* kInvariant = "batch_invariant";

  static auto* node_of(const Tensor& output) {
    return dynamic_cast<torch::autograd::CppNode<Recorded>*>(output.grad_fn().get());
  }
};

// Returns the Autograd kernel of an op whose gradient is the autograd Function `Function`. If
// autograd must record a call, the kernel applies Function; otherwise it calls the op without
// autograd. Before it applies Function, the kernel calls check(name, args...). Error messages then
// name this op instead of <op>_forward, which Function calls.
template <typename Function, typename Op, typename Result, typename... Args, typename Check>
torch::CppFunction recorded_by(const OpCall<Op, Result(Args...)>&, Check check) {
  return torch::CppFunction([check](Args... args) -> Result {
    check_no_tangent(Op::kName, plain(args)...);
    if (any_needs_grad(plain(args)...)) {
      check(Op::kName, plain(args)...);
      using Record = Recorded<Function, Op>;
      variable_list saved;
      auto outputs = [&] {
        try {
          return Record::apply(&saved, plain(args)...);
        } catch (...) {
          Record::release(saved);
          throw;
        }
      }();
      Record::clear_non_differentiable(saved);
      if constexpr (Finishes<Function>::value) {
        outputs[0] = FinishFunction::apply(
            outputs[0], std::function([&] { return Function::finish(outputs, args...); }));
      }
      if constexpr (std::is_same_v<decltype(outputs), Tensor>) {
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

using Grads2 = std::tuple<Tensor, Tensor>;

// The autograd Function of an op with two tensor arguments, a and b. The signature of the backward
// op is backward(dy, a, b) or backward(dy, a, b, output_mask).
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
      AskedGradients asked(ctx);
      const Mask wanted = {asked.next(), asked.next()};
      auto [da, db] = BackwardCall()(grads[0], saved[0], saved[1], wanted);
      return {if_wanted(wanted[0], da), if_wanted(wanted[1], db)};
    } else {
      auto [da, db] = BackwardCall()(grads[0], saved[0], saved[1]);
      return {da, db};
    }
  }
};

// dispatch.cpp defines these functions, so that this header need not include torch's autocast
// header, which includes every operator.
c10::DispatchKey autocast_key(at::DeviceType device);
at::ScalarType autocast_dtype(at::DeviceType device);
Tensor autocast_cast(const Tensor& t, at::ScalarType dtype, at::DeviceType device);

// A function object that casts floating-point tensors to the autocast dtype. It returns all other
// arguments unchanged. While the object exists, autocast is off.
template <at::DeviceType device>
struct Autocast {
  c10::impl::ExcludeDispatchKeyGuard off{c10::DispatchKeySet(autocast_key(device))};
  at::ScalarType dtype = autocast_dtype(device);

  Tensor operator()(const Tensor& t) const { return autocast_cast(t, dtype, device); }
  OptionalTensor operator()(const OptionalTensor& t) const {
    return is_given(t) ? OptionalTensor((*this)(*t)) : std::nullopt;
  }
  variable_list operator()(at::TensorList list) const {
    variable_list all;
    for (const Tensor& t : list) all.push_back((*this)(t));
    return all;
  }
  variable_list operator()(const OptionalList& list) const { return (*this)(plain(list)); }
  template <typename T>
  const T& operator()(const T& other) const {
    return other;
  }
};

// Returns the autocast kernel of an op. The kernel casts all tensor arguments, then calls the op.
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

// The kernels of an op. For example, TW_KERNELS(softmax) is the set softmax_meta, softmax_cpu and
// softmax_cuda.
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
