#include "core/dispatch.h"

#include <ATen/autocast_mode.h>

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

c10::DispatchKey autocast_key(at::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

at::ScalarType autocast_dtype(at::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}

Tensor autocast_cast(const Tensor& t, at::ScalarType dtype, at::DeviceType device) {
  return at::autocast::cached_cast(dtype, t, device);
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
