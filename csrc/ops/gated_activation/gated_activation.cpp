// gated_activation computes y = gate(left, right), the gate of gated_linear without the matmul.
//   left, right and y (..., N)
// The backward computes dleft and dright in one pass over dy, left and right. The forward
// and the backward compute in fp32 (fp64 for fp64 inputs) and round each result once.
#include "core/dispatch.h"
#include "layers/gate.h"

#ifdef TORCHWELD_CUDA
#include "ops/gated_activation/gated_activation.h"
#endif

namespace torchweld::gated_activation_op {
namespace {

using Grads = std::tuple<Tensor, Tensor>;
using Wanted = std::array<bool, 2>;

void gated_activation_checks(const char* op, const Tensor& left, const Tensor& right,
                             c10::string_view gate) {
  check_floating(op, "left", left);
  check_min_dim(op, "left", left, 1, "(..., N)");
  check_like(op, "right", right, "left", left);
  check_shape(op, "right", right, left.sym_sizes(), "left's shape");
  parse_gate(op, gate);
}

Tensor gated_activation_meta(const Tensor& left, const Tensor& right, c10::string_view gate) {
  gated_activation_checks("gated_activation", left, right, gate);
  return empty_result(left, left.sym_sizes());
}
TW_OP(gated_activation);

Grads gated_activation_backward_meta(const Tensor& dy, const Tensor& left, const Tensor& right,
                                     c10::string_view gate, Wanted output_mask) {
  const char* op = "gated_activation_backward";
  gated_activation_checks(op, left, right, gate);
  check_like(op, "dy", dy, "left", left);
  check_shape(op, "dy", dy, left.sym_sizes(), "left's shape");
  const auto gradient = [&](bool wanted) {
    return wanted ? empty_result(left, left.sym_sizes()) : at::empty({0}, left.options());
  };
  return {gradient(output_mask[0]), gradient(output_mask[1])};
}
TW_OP(gated_activation_backward);

// CPU: returns t as a matrix (rows, N) with stride 1 along the last dimension.
Tensor contiguous_columns(const Tensor& t) {
  const Tensor matrix = as_matrix(t);
  return matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

Tensor gated_activation_cpu(const Tensor& left, const Tensor& right, c10::string_view gate) {
  const Tensor y = gated_activation_meta(left, right, gate);
  if (y.numel() == 0) return y;
  const Halves z(contiguous_columns(left), contiguous_columns(right));
  return apply_gate(z, parse_gate("gated_activation", gate)).view(y.sizes());
}

Grads gated_activation_backward_cpu(const Tensor& dy, const Tensor& left, const Tensor& right,
                                    c10::string_view gate, Wanted output_mask) {
  auto [dleft, dright] = gated_activation_backward_meta(dy, left, right, gate, output_mask);
  if (left.numel() == 0) return {dleft, dright};
  const Halves z(contiguous_columns(left), contiguous_columns(right));
  const Halves dz =
      gate_backward(contiguous_columns(dy), z, parse_gate("gated_activation_backward", gate));
  if (output_mask[0]) dleft = dz.left.view(left.sizes());
  if (output_mask[1]) dright = dz.right.view(left.sizes());
  return {dleft, dright};
}

#ifdef TORCHWELD_CUDA
Tensor gated_activation_cuda(const Tensor& left, const Tensor& right, c10::string_view gate) {
  const Tensor y = gated_activation_meta(left, right, gate);
  if (y.numel() == 0) return y;
  const OnDevice on(left.device());
  const Rows in_left(left), in_right(right);
  launch_gated_activation(
      {const_data<void>(in_left.tensor), const_data<void>(in_right.tensor), mutable_data<void>(y),
       in_left.row_stride, in_right.row_stride, in_left.rows, in_left.n,
       parse_gate("gated_activation", gate), dtype_of(y)},
      current_stream());
  return y;
}

Grads gated_activation_backward_cuda(const Tensor& dy, const Tensor& left, const Tensor& right,
                                     c10::string_view gate, Wanted output_mask) {
  auto [dleft, dright] = gated_activation_backward_meta(dy, left, right, gate, output_mask);
  if (left.numel() == 0 || !(output_mask[0] || output_mask[1])) return {dleft, dright};
  const OnDevice on(left.device());
  const Rows in_dy(dy), in_left(left), in_right(right);
  launch_gated_activation_backward(
      {const_data<void>(in_dy.tensor), const_data<void>(in_left.tensor),
       const_data<void>(in_right.tensor), data_if_wanted(dleft), data_if_wanted(dright),
       in_dy.row_stride, in_left.row_stride, in_right.row_stride, in_left.rows, in_left.n,
       parse_gate("gated_activation_backward", gate), dtype_of(left)},
      current_stream());
  return {dleft, dright};
}
#endif

struct GatedActivationFunction : torch::autograd::Function<GatedActivationFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& left, const Tensor& right,
                        c10::string_view gate) {
    ctx->save_for_backward({left, right});
    ctx->saved_data["gate"] = gate;
    return call_gated_activation.below(left, right, gate);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const Wanted wanted = {asked.next(), asked.next()};
    auto [dleft, dright] = call_gated_activation_backward(
        grads[0], saved[0], saved[1], ctx->saved_data["gate"].toStringRef(), wanted);
    return {if_wanted(wanted[0], dleft), if_wanted(wanted[1], dright), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "gated_activation(Tensor left, Tensor right, *, str gate=\"swiglu\") -> Tensor",
            TW_KERNELS(gated_activation),
            recorded_by<GatedActivationFunction>(call_gated_activation, gated_activation_checks));
  define_op(m,
            "gated_activation_backward(Tensor dy, Tensor left, Tensor right, *, "
            "str gate=\"swiglu\", bool[2] output_mask) -> (Tensor dleft, Tensor dright)",
            TW_KERNELS(gated_activation_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::gated_activation_op
