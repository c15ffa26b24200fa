// outer_add:  z[i, j] = x[j] + y[i]       x (cols,), y (rows,), z (rows, cols)
// Gradient:   dx = dz summed over the rows, dy = dz summed over the columns; a GPU computes both in
//             one pass over dz
//
// The sums are accumulated in fp32 (fp64 for fp64 inputs).
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "core/sum.h"

#ifdef TORCHWELD_CUDA
#include "pointwise/matrix_inputs.h"
#endif

namespace torchweld::outer_add_op {
namespace {

Tensor outer_add_meta(const Tensor& x, const Tensor& y) {
  const char* op = "outer_add";
  check_floating(op, "x", x);
  check_dim(op, "x", x, 1, "(cols,)");
  check_like(op, "y", y, "x", x);
  check_dim(op, "y", y, 1, "(rows,)");
  return at::empty_symint({y.sym_size(0), x.sym_size(0)}, x.options());
}
TW_OP(outer_add);

Grads2 outer_add_backward_meta(const Tensor& dz) {
  const char* op = "outer_add_backward";
  check_floating(op, "dz", dz);
  check_dim(op, "dz", dz, 2, "(rows, cols)");
  return {at::empty_symint({dz.sym_size(1)}, dz.options()),
          at::empty_symint({dz.sym_size(0)}, dz.options())};
}
TW_OP(outer_add_backward);

Tensor outer_add_cpu(const Tensor& x, const Tensor& y) {
  Tensor z = outer_add_meta(x, y);
  if (z.numel() > 0) at::add_out(z, x.unsqueeze(0), y.unsqueeze(1));
  return z;
}

Grads2 outer_add_backward_cpu(const Tensor& dz) {
  auto [dx, dy] = outer_add_backward_meta(dz);
  sum_into(dx, dz, 0);
  sum_into(dy, dz, 1);
  return {dx, dy};
}

#ifdef TORCHWELD_CUDA
Tensor outer_add_cuda(const Tensor& x, const Tensor& y) {
  Tensor z = outer_add_meta(x, y);
  if (z.numel() == 0) return z;
  matrix_pass_cuda(OuterAddCell{}, {/*in=*/{}, x, y, z});
  return z;
}

Grads2 outer_add_backward_cuda(const Tensor& dz) {
  auto [dx, dy] = outer_add_backward_meta(dz);
  if (dz.numel() == 0) return {dx.zero_(), dy.zero_()};
  matrix_pass_cuda(OuterAddBackwardCell{}, {{dz}, /*x=*/{}, /*y=*/{}, /*out=*/{}, dy, dx});
  return {dx, dy};
}
#endif

struct OuterAddFunction : torch::autograd::Function<OuterAddFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y) {
    return call_outer_add.below(x, y);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto [dx, dy] = call_outer_add_backward(grads[0]);
    return {dx, dy};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "outer_add(Tensor x, Tensor y) -> Tensor", TW_KERNELS(outer_add),
            recorded_by<OuterAddFunction>(call_outer_add));
  define_op(m, "outer_add_backward(Tensor dz) -> (Tensor dx, Tensor dy)",
            TW_KERNELS(outer_add_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::outer_add_op
