// Uses torchweld from C++ alone: runs a scripted module, and trains for one step.
//
//   run_scripted SCRIPTED_MODULE
//
// The module's buffer `example` is an input. The buffer `expected` is the result that Python
// computes from this input.
#include <torch/csrc/jit/serialization/import.h>
#include <torchweld/ops.h>

#include <iostream>

namespace {

bool same_as_python(const char* path) {
  torch::jit::Module module = torch::jit::load(path);
  const at::Tensor example = module.attr("example").toTensor();
  const at::Tensor expected = module.attr("expected").toTensor();
  const at::Tensor out = module.forward({example}).toTensor();
  return at::equal(out, expected);
}

// Does one step of gradient descent towards a fixed target. Returns whether the loss falls.
bool trains() {
  at::manual_seed(0);
  const at::Tensor x = at::randn({16, 8}), target = at::randn({16, 4});
  at::Tensor weight = at::randn({4, 8}).requires_grad_(), bias = at::zeros({4}).requires_grad_();
  const auto loss_of = [&] {
    return (torchweld::layer_norm_linear(x, weight, bias) - target).square().mean();
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
  if (argc != 2) {
    std::cerr << "usage: run_scripted SCRIPTED_MODULE\n";
    return 2;
  }
  if (!same_as_python(argv[1])) {
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
