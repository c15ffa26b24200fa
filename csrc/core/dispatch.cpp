#include "core/dispatch.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_add_batch_dim.h>
#include <ATen/ops/_remove_batch_dim.h>
#include <ATen/ops/stack.h>

namespace torchweld {

void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
#ifdef TORCHWELD_CUDA
  const char* why = "this version has no CUDA kernel for it yet; use the torch ops it replaces";
#else
  const char* why = "this build is CPU-only; reinstall torchweld where nvcc is found";
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the tensors are on a CUDA device, but ",
                              why);
}

void for_each_of_batch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = -1, size = 0;
  const auto find_batch = [&](const Tensor& t) {
    const auto* batched = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr;
    if (batched == nullptr || batched->bdims().back().level() <= level) return;
    level = batched->bdims().back().level();
    size = batched->value().size(batched->bdims().back().dim());
  };
  for (const at::IValue& argument : arguments) {
    if (argument.isTensor()) find_batch(argument.toTensor());
    if (!argument.isTensorList()) continue;
    for (const Tensor& t : argument.toTensorVector()) find_batch(t);
  }
  const auto entry = [&](const Tensor& t, int64_t i) {
    return t.defined() ? at::_remove_batch_dim(t, level, size, 0).select(0, i) : t;
  };
  std::vector<variable_list> results;
  for (int64_t i = 0; i < size; ++i) {
    torch::jit::Stack call;
    for (const at::IValue& argument : arguments) {
      if (argument.isTensorList()) {
        variable_list tensors = argument.toTensorVector();
        for (Tensor& t : tensors) t = entry(t, i);
        call.emplace_back(std::move(tensors));
      } else {
        call.push_back(argument.isTensor() ? at::IValue(entry(argument.toTensor(), i)) : argument);
      }
    }
    op.callBoxed(&call);
    results.push_back(call[0].toTensorVector());
  }
  variable_list stacked;
  for (size_t r = 0; size > 0 && r < results[0].size(); ++r) {
    variable_list entries;
    for (const variable_list& each : results) entries.push_back(each[r]);
    stacked.push_back(at::_add_batch_dim(at::stack(entries), 0, level));
  }
  torch::jit::push(*stack, std::move(stacked));
}

c10::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

at::ScalarType autocast_dtype(at::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}

Tensor autocast_cast(const Tensor& t, at::ScalarType dtype, at::DeviceType device) {
  return at::autocast::cached_cast(dtype, t, device);
}

void check_not_split(const char* op, const torch::autograd::Node& node,
                     const variable_list& grads) {
  // NOTE: AOTAutograd hooks every node on both sides. torch's debug log hooks every node too, but
  // there autograd asks for all gradients of the node.
  if (node.pre_hooks().empty() || !node.post_hooks().empty()) return;
  bool asks_for_all = true;
  for (size_t i = 0; i < node.num_outputs(); ++i) {
    asks_for_all &= !node.next_edge(i).is_valid() || node.task_should_compute_output(i);
  }
  if (asks_for_all) return;
  const bool of_first = std::none_of(grads.begin() + 1, grads.end(),
                                     [](const Tensor& grad) { return grad.defined(); });
  TORCH_CHECK_NOT_IMPLEMENTED(
      of_first, "torchweld::", op,
      ": the gradients of its inputs and of its parameters must be computed in one pass, but a "
      "hook (zero-bubble pipelining) splits its backward, and torch mixes the gradients of several "
      "results; use a schedule that does not split it, such as Interleaved1F1B");
}

namespace {

// Makes a node of autograd's graph. NodePtr is std::shared_ptr, or c10::intrusive_ptr in newer
// versions of torch.
template <typename NodePtr, typename Node, typename... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_constructible_v<NodePtr, std::shared_ptr<Node>>) {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

}  // namespace

void refuse_second_derivative(const char* op, const torch::autograd::Node& node,
                              const variable_list& grads, variable_list& results) {
  auto edges = node.next_edges();
  const auto of_grads = torch::autograd::collect_next_edges(grads);
  edges.insert(edges.end(), of_grads.begin(), of_grads.end());
  std::string name = std::string("torchweld::") + op;
  if (const size_t at = name.rfind("_forward"); at != std::string::npos) name.resize(at);
  using NodePtr = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;
  const auto refusal =
      make_node<NodePtr, torch::autograd::NotImplemented>(name + "_backward", std::move(edges));
  for (const Tensor& result : results) {
    // A gradient that only passes through does not depend on the inputs of the node.
    const bool passes = std::any_of(grads.begin(), grads.end(),
                                    [&](const Tensor& grad) { return grad.is_same(result); });
    if (result.defined() && !passes && !result.requires_grad()) {
      torch::autograd::set_history(result, refusal);
    }
  }
}

void define_op(torch::Library& m, const std::string& schema, Kernels kernels,
               torch::CppFunction autograd) {
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  const std::string name = schema.substr(0, schema.find('('));
  const auto impl = [&](c10::DispatchKey key, torch::CppFunction& kernel) {
    m.impl(name.c_str(), torch::dispatch(key, std::move(kernel)));
  };
  impl(c10::DispatchKey::Meta, kernels.meta);
  impl(c10::DispatchKey::CPU, kernels.cpu);
  impl(c10::DispatchKey::CUDA, kernels.cuda);
  impl(c10::DispatchKey::Autograd, autograd);
}

}  // namespace torchweld
