// outer_mul_relu:  z[i, j] = relu(x[j] * y[i])       x (cols,), y (rows,), z (rows, cols)
// Gradient:        dx[j] = sum_i g[i, j] * y[i], dy[i] = sum_j g[i, j] * x[j], where g = 0 if the
//                  product is at most 0, else dz; one pass over dz computes both gradients
//
// Products, their signs and sums are computed in fp32 (fp64 for fp64 inputs).
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "pointwise/matrix_cells.h"
#include "pointwise/matrix_pass_cpu.h"

#ifdef TORCHWELD_CUDA
#include "pointwise/matrix_inputs.h"
#endif

namespace torchweld::outer_mul_relu_op {
namespace {

// Checks the vectors and returns the sizes of z.
std::vector<c10::SymInt> check_vectors(const char* op, const Tensor& x, const Tensor& y) {
  check_floating(op, "x", x);
  check_dim(op, "x", x, 1, "(cols,)");
  check_like(op, "y", y, "x", x);
  check_dim(op, "y", y, 1, "(rows,)");
  return {y.sym_size(0), x.sym_size(0)};
}

Tensor outer_mul_relu_meta(const Tensor& x, const Tensor& y) {
  return at::empty_symint(check_vectors("outer_mul_relu", x, y), x.options());
}
TW_OP(outer_mul_relu);

Grads2 outer_mul_relu_backward_meta(const Tensor& dz, const Tensor& x, const Tensor& y) {
  const char* op = "outer_mul_relu_backward";
  const auto sizes = check_vectors(op, x, y);
  check_like(op, "dz", dz, "x", x);
  check_shape(op, "dz", dz, sizes, "(rows, cols)");
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(y.sym_sizes(), y.options())};
}
TW_OP(outer_mul_relu_backward);

Tensor outer_mul_relu_cpu(const Tensor& x, const Tensor& y) {
  Tensor z = outer_mul_relu_meta(x, y);
  if (z.numel() == 0) return z;
  relu_product_cpu(z, x.expand_as(z), y.unsqueeze(1).expand_as(z));
  return z;
}

Grads2 outer_mul_relu_backward_cpu(const Tensor& dz, const Tensor& x, const Tensor& y) {
  auto [dx, dy] = outer_mul_relu_backward_meta(dz, x, y);
  if (dz.numel() == 0) return {dx.zero_(), dy.zero_()};
  matrix_pass_cpu(OuterMulReluBackwardCell{}, {{dz}, x, y, /*out=*/{}, dy, dx});
  return {dx, dy};
}

#ifdef TORCHWELD_CUDA
Tensor outer_mul_relu_cuda(const Tensor& x, const Tensor& y) {
  Tensor z = outer_mul_relu_meta(x, y);
  if (z.numel() == 0) return z;
  matrix_pass_cuda(OuterMulReluCell{}, {/*in=*/{}, x, y, z});
  return z;
}

Grads2 outer_mul_relu_backward_cuda(const Tensor& dz, const Tensor& x, const Tensor& y) {
  auto [dx, dy] = outer_mul_relu_backward_meta(dz, x, y);
  if (dz.numel() == 0) return {dx.zero_(), dy.zero_()};
  matrix_pass_cuda(OuterMulReluBackwardCell{}, {{dz}, x, y, /*out=*/{}, dy, dx});
  return {dx, dy};
}
#endif

using OuterMulReluFunction = FunctionOfTwo<outer_mul_relu_call, outer_mul_relu_backward_call>;

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "outer_mul_relu(Tensor x, Tensor y) -> Tensor", TW_KERNELS(outer_mul_relu),
            recorded_by<OuterMulReluFunction>(call_outer_mul_relu));
  define_op(m, "outer_mul_relu_backward(Tensor dz, Tensor x, Tensor y) -> (Tensor dx, Tensor dy)",
            TW_KERNELS(outer_mul_relu_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::outer_mul_relu_op
