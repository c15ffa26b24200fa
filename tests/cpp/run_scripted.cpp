// Uses torchweld from C++ alone: loads the operator library, runs a scripted module, and trains for
// one step.
//
//   run_scripted OPS_LIBRARY SCRIPTED_MODULE
//
// The module's buffer `example` is an input. The buffer `expected` is the result that Python
// computes from this input.
#include <dlfcn.h>
#include <torch/script.h>

#include <iostream>

#include <ATen/core/dispatch/Dispatcher.h>

namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor layer_norm_linear(const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, double, c10::string_view);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchweld::layer_norm_linear", "")
                             .typed<Signature>();
  return op.call(x, weight, bias, std::nullopt, std::nullopt, 1e-5, "gelu_tanh");
}

bool same_as_python(const char* path) {
  torch::jit::Module module = torch::jit::load(path);
  const at::Tensor example = module.attr("example").toTensor();
  const at::Tensor expected = module.attr("expected").toTensor();
  const at::Tensor out = module.forward({example}).toTensor();
  return torch::equal(out, expected);
}

// Does one step of gradient descent towards a fixed target. Returns whether the loss falls.
bool trains() {
  at::manual_seed(0);
  const at::Tensor x = at::randn({16, 8}), target = at::randn({16, 4});
  at::Tensor weight = at::randn({4, 8}).requires_grad_(), bias = at::zeros({4}).requires_grad_();
  const auto loss_of = [&] {
    return (layer_norm_linear(x, weight, bias) - target).square().mean();
  };
  const at::Tensor before = loss_of();
  before.backward();
  {
    at::NoGradGuard no_grad;
    weight.sub_(weight.grad(), 0.1);
    bias.sub_(bias.grad(), 0.1);
  }
  return loss_of().item<double>() < before.item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: run_scripted OPS_LIBRARY SCRIPTED_MODULE\n";
    return 2;
  }
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 2;
  }
  if (!same_as_python(argv[2])) {
    std::cerr << "the scripted module's result is not Python's\n";
    return 1;
  }
  if (!trains()) {
    std::cerr << "the loss did not fall\n";
    return 1;
  }
  std::cout << "same bits as Python, one step trained\n";
  return 0;
}
