// gated_linear_pair computes y = gate(x @ left.T + left_bias, x @ right.T + right_bias).
//   x (..., K), left and right (N, K), left_bias and right_bias (N,), y (..., N)
// The gates are those of gated_linear. The gradients are dx = dz_left @ left + dz_right @ right,
// dleft = dz_left^T @ x and dright = dz_right^T @ x.
//
// gated_linear_pair_forward also returns z (..., 2N). The first N columns of z are the result of
// the left matmul, and the last N columns are the result of the right matmul. If both weights have
// the same strides, the matmul kernel reads them where they are. Otherwise they are concatenated
// (Matrix::pair_of).
#include "core/dispatch.h"
#include "layers/gated_pair.h"

namespace torchweld::gated_linear_pair_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 5>;

std::vector<c10::SymInt> gated_linear_pair_checks(const char* op, const Tensor& x,
                                                  const Tensor& left, const Tensor& right,
                                                  const OptionalTensor& left_bias,
                                                  const OptionalTensor& right_bias,
                                                  c10::string_view gate) {
  auto sizes = check_pair(op, x, left, right, gate);
  check_pair_biases(op, left_bias, right_bias, left, x);
  return sizes;
}

Tensor gated_linear_pair_meta(const Tensor& x, const Tensor& left, const Tensor& right,
                              const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                              c10::string_view gate) {
  return empty_result(x, gated_linear_pair_checks("gated_linear_pair", x, left, right, left_bias,
                                                  right_bias, gate));
}
TW_OP(gated_linear_pair);

Forward gated_linear_pair_forward_meta(const Tensor& x, const Tensor& left, const Tensor& right,
                                       const OptionalTensor& left_bias,
                                       const OptionalTensor& right_bias, c10::string_view gate) {
  const auto sizes = gated_linear_pair_checks("gated_linear_pair_forward", x, left, right,
                                              left_bias, right_bias, gate);
  return {empty_result(x, sizes), empty_result(x, with_last(x, 2 * left.sym_size(0)))};
}
TW_OP(gated_linear_pair_forward);

Grads gated_linear_pair_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& left,
                                      const Tensor& right, const Tensor& z, c10::string_view gate,
                                      Wanted output_mask) {
  const char* op = "gated_linear_pair_backward";
  const auto sizes = check_pair(op, x, left, right, gate);
  check_dy(op, dy, sizes, x);
  check_like(op, "z", z, "x", x);
  check_shape(op, "z", z, with_last(x, 2 * left.sym_size(0)), "(..., 2N)");
  const auto bias_grad = [&](bool wanted) {
    return empty_vector_grad(left, left.sym_size(0), wanted);
  };
  return {empty_input_grad(x, output_mask[0]), empty_weight_grad(left, output_mask[1]),
          empty_weight_grad(right, output_mask[2]), bias_grad(output_mask[3]),
          bias_grad(output_mask[4])};
}
TW_OP(gated_linear_pair_backward);

Tensor gated_linear_pair_cpu(const Tensor& x, const Tensor& left, const Tensor& right,
                             const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                             c10::string_view gate) {
  const Tensor y = gated_linear_pair_meta(x, left, right, left_bias, right_bias, gate);
  const Halves z = pair_branches(x, left, right, left_bias, right_bias);
  return apply_gate(z, parse_gate("gated_linear_pair", gate)).view(y.sizes());
}

Forward gated_linear_pair_forward_cpu(const Tensor& x, const Tensor& left, const Tensor& right,
                                      const OptionalTensor& left_bias,
                                      const OptionalTensor& right_bias, c10::string_view gate) {
  const auto [y, z] = gated_linear_pair_forward_meta(x, left, right, left_bias, right_bias, gate);
  const Halves computed = pair_branches(x, left, right, left_bias, right_bias);
  save_halves(z, computed);
  const Gate parsed = parse_gate("gated_linear_pair_forward", gate);
  return {apply_gate(computed, parsed).view(y.sizes()), z};
}

Grads gated_linear_pair_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& left,
                                     const Tensor& right, const Tensor& z, c10::string_view gate,
                                     Wanted output_mask) {
  auto [dx, dleft, dright, dleft_bias, dright_bias] =
      gated_linear_pair_backward_meta(dy, x, left, right, z, gate, output_mask);
  const Halves dz = gate_backward(as_matrix(dy), Halves(as_matrix(z.contiguous()), false),
                                  parse_gate("gated_linear_pair_backward", gate));
  pair_backward_cpu(dx, dleft, dright, dleft_bias, dright_bias, output_mask, dz, x, left, right);
  return {dx, dleft, dright, dleft_bias, dright_bias};
}

#ifdef TORCHWELD_CUDA
Tensor gated_linear_pair_cuda(const Tensor& x, const Tensor& left, const Tensor& right,
                              const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                              c10::string_view gate) {
  Tensor y = gated_linear_pair_meta(x, left, right, left_bias, right_bias, gate);
  const OnDevice on(x.device());
  pair_matmul_into(y, {}, x, left, right, left_bias, right_bias,
                   parse_gate("gated_linear_pair", gate));
  return y;
}

Forward gated_linear_pair_forward_cuda(const Tensor& x, const Tensor& left, const Tensor& right,
                                       const OptionalTensor& left_bias,
                                       const OptionalTensor& right_bias, c10::string_view gate) {
  auto [y, z] = gated_linear_pair_forward_meta(x, left, right, left_bias, right_bias, gate);
  const OnDevice on(x.device());
  pair_matmul_into(y, z, x, left, right, left_bias, right_bias,
                   parse_gate("gated_linear_pair_forward", gate));
  return {y, z};
}

Grads gated_linear_pair_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& left,
                                      const Tensor& right, const Tensor& z, c10::string_view gate,
                                      Wanted output_mask) {
  auto [dx, dleft, dright, dleft_bias, dright_bias] =
      gated_linear_pair_backward_meta(dy, x, left, right, z, gate, output_mask);
  const OnDevice on(x.device());
  const Tensor dz =
      gate_backward_into(dleft_bias, dright_bias, dy, z,
                         parse_gate("gated_linear_pair_backward", gate), /*interleaved=*/false);
  const Tensor nothing = dleft_bias.narrow(0, 0, 0);
  pair_backward_into(dx, dleft, dright, nothing, nothing,
                     {output_mask[0], output_mask[1], output_mask[2]}, dz, x, left, right);
  return {dx, dleft, dright, dleft_bias, dright_bias};
}
#endif

struct GatedLinearPairFunction : torch::autograd::Function<GatedLinearPairFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& left,
                               const Tensor& right, const OptionalTensor& left_bias,
                               const OptionalTensor& right_bias, c10::string_view gate) {
    auto [y, z] = call_gated_linear_pair_forward.below(x, left, right, left_bias, right_bias, gate);
    ctx->save_for_backward({x, left, right, z});
    Donation::prepare(ctx);
    ctx->saved_data["gate"] = gate;
    ctx->saved_data["left_bias"] = is_given(left_bias);
    ctx->saved_data["right_bias"] = is_given(right_bias);
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(6);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &left = saved[1], &right = saved[2];
    AskedGradients asked(ctx);
    const Wanted wanted = {asked.next(), asked.next(), asked.next(),
                           asked.next(ctx->saved_data["left_bias"].toBool()),
                           asked.next(ctx->saved_data["right_bias"].toBool())};
    const Donation z(ctx, saved[3], grads[0]);
    auto [dx, dleft, dright, dleft_bias, dright_bias] = call_gated_linear_pair_backward(
        grads[0], x, left, right, saved[3], ctx->saved_data["gate"].toStringRef(), wanted);
    all[0] = if_wanted(wanted[0], dx);
    all[1] = if_wanted(wanted[1], dleft);
    all[2] = if_wanted(wanted[2], dright);
    all[3] = if_wanted(wanted[3], dleft_bias);
    all[4] = if_wanted(wanted[4], dright_bias);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string name = "gated_linear_pair";
  const std::string inputs =
      "(Tensor x, Tensor left, Tensor right, Tensor? left_bias=None, Tensor? right_bias=None, *, "
      "str gate=\"swiglu\") -> ";
  define_op(m, name + inputs + "Tensor", TW_KERNELS(gated_linear_pair),
            recorded_by<GatedLinearPairFunction>(call_gated_linear_pair, gated_linear_pair_checks));
  define_op(m, name + "_forward" + inputs + "(Tensor y, Tensor z)",
            TW_KERNELS(gated_linear_pair_forward),
            recorded_by<GatedLinearPairFunction>(call_gated_linear_pair_forward));
  define_op(m,
            name +
                "_backward(Tensor dy, Tensor x, Tensor left, Tensor right, Tensor z, *, "
                "str gate=\"swiglu\", bool[5] output_mask) -> "
                "(Tensor dx, Tensor dleft, Tensor dright, Tensor dleft_bias, Tensor dright_bias)",
            TW_KERNELS(gated_linear_pair_backward), no_gradient_function());
  define_autocast(m, call_gated_linear_pair);
  define_autocast(m, call_gated_linear_pair_forward);
}

}  // namespace
}  // namespace torchweld::gated_linear_pair_op
