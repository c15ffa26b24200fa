// Trains a layer for 20 steps, without Python.
#include <torchweld/ops.h>

#include <iostream>

int main() {
  at::manual_seed(0);
  const at::Tensor x = at::randn({64, 16}), target = at::randn({64, 8});
  at::Tensor weight = at::zeros({8, 16}).requires_grad_();
  for (int step = 0; step < 20; ++step) {
    const at::Tensor y = torchweld::linear(x, weight, /*bias=*/{}, "gelu_tanh");
    const at::Tensor loss = (y - target).square().mean();
    loss.backward();
    std::cout << loss.item<float>() << "\n";
    const at::NoGradGuard no_grad;
    weight.sub_(weight.grad());
    weight.mutable_grad().reset();
  }
}
