// Runs a package of AOTInductor that calls torchweld's operators, without Python.
//
//   run_exported PACKAGE EXAMPLE
//
// EXAMPLE is a file that torch.save has written. It holds a list of two tensors: an input, and the
// result that Python computes from this input.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

namespace {

c10::List<c10::IValue> read_list(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes).toList();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: run_exported PACKAGE EXAMPLE\n";
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const auto example = read_list(argv[2]);
  const at::Tensor x = example.get(0).toTensor(), expected = example.get(1).toTensor();
  const std::vector<at::Tensor> out = model.run({x});
  if (!out[0].allclose(expected)) {
    std::cerr << "the package's result is not Python's\n";
    return 1;
  }
  std::cout << "same result as Python\n";
  return 0;
}
