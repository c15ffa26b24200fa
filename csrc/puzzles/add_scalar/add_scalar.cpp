// add_scalar:  z = x + value       x, z of any shape
// Gradient:    dx = dz
//
// The op computes in fp32 (fp64 for fp64 inputs) and rounds once.
#include <ATen/ScalarOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "core/dispatch.h"

#ifdef TORCHWELD_CUDA
#include "pointwise/matrix_inputs.h"
#endif

namespace torchweld::add_scalar_op {
namespace {

Tensor add_scalar_meta(const Tensor& x, double value) {
  check_floating("add_scalar", "x", x);
  return at::empty_symint(x.sym_sizes(), x.options());
}
TW_OP(add_scalar);

Tensor add_scalar_cpu(const Tensor& x, double value) {
  Tensor z = add_scalar_meta(x, value);
  if (z.numel() == 0) return z;
  if (acc_dtype(x) == x.scalar_type()) {
    at::add_out(z, x, at::native::wrapped_scalar_tensor(value));
  } else {
    // Pass `value` as a float32 tensor that has the number of dims of x. torch would round a scalar
    // to 16 bits before the addition, but it does not round a tensor that has dims.
    const std::vector<int64_t> ones(x.dim(), 1);
    at::add_out(z, x, at::full(ones, value, at::kDouble).to(acc_dtype(x)));
  }
  return z;
}

#ifdef TORCHWELD_CUDA
// A contiguous tensor is processed as a matrix with kWidth columns. If its size is not a multiple
// of kWidth, it is processed as one row. Other values of kWidth would also be correct. This value
// fits the tiles of the kernel.
constexpr int64_t kWidth = 16384;

Tensor add_scalar_cuda(const Tensor& x, double value) {
  Tensor z = add_scalar_meta(x, value);
  if (z.numel() == 0) return z;
  const int64_t width = x.numel() % kWidth == 0 ? kWidth : x.numel();
  const Tensor matrix = x.dim() > 0 && !x.is_contiguous() ? x : x.reshape({-1, width});
  matrix_pass_cuda(AddScalarCell{value}, {{matrix}, /*x=*/{}, /*y=*/{}, z});
  return z;
}
#endif

struct AddScalarFunction : torch::autograd::Function<AddScalarFunction> {
  static constexpr bool kTwice = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double value) {
    return call_add_scalar.below(x, value);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0], Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "add_scalar(Tensor x, float value) -> Tensor", TW_KERNELS(add_scalar),
            recorded_by<AddScalarFunction>(call_add_scalar));
}

}  // namespace
}  // namespace torchweld::add_scalar_op
