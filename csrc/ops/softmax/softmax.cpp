// softmax over the last dim:  y[..., j] = exp(x[..., j]) / sum_k exp(x[..., k])       x, y (..., n)
// Gradient:                   dx = y * (dy - sum(dy * y))
//
// The maximum and the sum of a row are computed in fp32 (fp64 for fp64 inputs). If all elements of
// a row are -inf, the results of the row are NaN, as in torch.
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>

#include "core/dispatch.h"

#ifdef TORCHWELD_CUDA
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "softmax/params.h"
#endif

namespace torchweld::softmax_op {
namespace {

Tensor softmax_meta(const Tensor& x) {
  check_floating("softmax", "x", x);
  check_min_dim("softmax", "x", x, 1, "(..., n)");
  return at::empty_symint(x.sym_sizes(), x.options());
}
TW_OP(softmax);

Tensor softmax_backward_meta(const Tensor& dy, const Tensor& y) {
  check_floating("softmax_backward", "dy", dy);
  check_min_dim("softmax_backward", "dy", dy, 1, "(..., n)");
  check_like("softmax_backward", "y", y, "dy", dy);
  check_shape("softmax_backward", "y", y, dy.sym_sizes(), "dy's shape");
  return at::empty_symint(y.sym_sizes(), y.options());
}
TW_OP(softmax_backward);

Tensor softmax_cpu(const Tensor& x) {
  Tensor y = softmax_meta(x);
  if (y.numel() > 0) at::_softmax_out(y, x, -1, /*half_to_float=*/false);
  return y;
}

Tensor softmax_backward_cpu(const Tensor& dy, const Tensor& y) {
  Tensor dx = softmax_backward_meta(dy, y);
  if (dx.numel() > 0) at::_softmax_backward_data_out(dx, dy, y, -1, y.scalar_type());
  return dx;
}

#ifdef TORCHWELD_CUDA
Tensor softmax_cuda(const Tensor& x) {
  Tensor y = softmax_meta(x);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  const cudaStream_t stream = current_stream();
  const Rows in(x);
  launch_softmax({const_data<void>(in.tensor), mutable_data<void>(y), in.rows, in.n, in.row_stride,
                  dtype_of(x)},
                 lazy_zero_counter(x), stream);
  return y;
}

Tensor softmax_backward_cuda(const Tensor& dy, const Tensor& y) {
  Tensor dx = softmax_backward_meta(dy, y);
  if (dx.numel() == 0) return dx;
  const OnDevice on(y.device());
  const cudaStream_t stream = current_stream();
  const Rows in_dy(dy), in_y(y);
  launch_softmax_backward(
      {const_data<void>(in_dy.tensor), const_data<void>(in_y.tensor), mutable_data<void>(dx),
       in_y.rows, in_y.n, in_dy.row_stride, in_y.row_stride, dtype_of(y)},
      lazy_zero_counter(y), stream);
  return dx;
}
#endif

struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    Tensor y = call_softmax.below(x);
    ctx->save_for_backward({y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_softmax_backward(grads[0], ctx->get_saved_variables()[0])};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "softmax(Tensor x) -> Tensor", TW_KERNELS(softmax),
            recorded_by<SoftmaxFunction>(call_softmax));
  define_op(m, "softmax_backward(Tensor dy, Tensor y) -> Tensor", TW_KERNELS(softmax_backward),
            no_gradient_function());
}

}  // namespace
}  // namespace torchweld::softmax_op
