// mul_relu:  z[i, j] = relu(x[i, j] * y[i])       x, z (rows, cols), y (rows,)
// Gradient:  dx[i, j] = g[i, j] * y[i], dy[i] = sum_j g[i, j] * x[i, j], where g = 0 if the
//            product is at most 0, else dz; one pass over dz and x computes both gradients
//
// Products, their signs and sums are computed in fp32 (fp64 for fp64 inputs).
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "pointwise/matrix_cells.h"
#include "pointwise/matrix_pass_cpu.h"

#ifdef TORCHWELD_CUDA
#include "pointwise/matrix_inputs.h"
#endif

namespace torchweld::mul_relu_op {
namespace {

void check_mul_relu(const char* op, const Tensor& x, const Tensor& y) {
  check_floating(op, "x", x);
  check_dim(op, "x", x, 2, "(rows, cols)");
  check_like(op, "y", y, "x", x);
  check_shape(op, "y", y, {x.sym_size(0)}, "(rows,)");
}

Tensor mul_relu_meta(const Tensor& x, const Tensor& y) {
  check_mul_relu("mul_relu", x, y);
  return at::empty_symint(x.sym_sizes(), x.options());
}
TW_OP(mul_relu);

Grads2 mul_relu_backward_meta(const Tensor& dz, const Tensor& x, const Tensor& y) {
  const char* op = "mul_relu_backward";
  check_mul_relu(op, x, y);
  check_like(op, "dz", dz, "x", x);
  check_shape(op, "dz", dz, x.sym_sizes(), "x's shape");
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(y.sym_sizes(), y.options())};
}
TW_OP(mul_relu_backward);

Tensor mul_relu_cpu(const Tensor& x, const Tensor& y) {
  Tensor z = mul_relu_meta(x, y);
  if (z.numel() == 0) return z;
  relu_product_cpu(z, x, y.unsqueeze(1).expand_as(z));
  return z;
}

Grads2 mul_relu_backward_cpu(const Tensor& dz, const Tensor& x, const Tensor& y) {
  auto [dx, dy] = mul_relu_backward_meta(dz, x, y);
  if (dz.numel() == 0) return {dx, dy.zero_()};
  matrix_pass_cpu(MulReluBackwardCell{}, {{dz, x}, /*x=*/{}, y, dx, /*row_sums=*/dy});
  return {dx, dy};
}

#ifdef TORCHWELD_CUDA
Tensor mul_relu_cuda(const Tensor& x, const Tensor& y) {
  Tensor z = mul_relu_meta(x, y);
  if (z.numel() == 0) return z;
  matrix_pass_cuda(MulReluCell{}, {{x}, /*x=*/{}, y, z});
  return z;
}

Grads2 mul_relu_backward_cuda(const Tensor& dz, const Tensor& x, const Tensor& y) {
  auto [dx, dy] = mul_relu_backward_meta(dz, x, y);
  if (dz.numel() == 0) return {dx, dy.zero_()};
  matrix_pass_cuda(MulReluBackwardCell{}, {{dz, x}, /*x=*/{}, y, dx, /*row_sums=*/dy});
  return {dx, dy};
}
#endif

using MulReluFunction = FunctionOfTwo<mul_relu_call, mul_relu_backward_call>;

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "mul_relu(Tensor x, Tensor y) -> Tensor", TW_KERNELS(mul_relu),
            recorded_by<MulReluFunction>(call_mul_relu));
  define_op(m, "mul_relu_backward(Tensor dz, Tensor x, Tensor y) -> (Tensor dx, Tensor dy)",
            TW_KERNELS(mul_relu_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::mul_relu_op
