// gated_linear_pair computes y = gate(x @ left.T + left_bias, x @ right.T + right_bias).
//   x (..., K), left and right (N, K), left_bias and right_bias (N,), y (..., N)
// The gates are those of gated_linear. The gradients are dx = dz_left @ left + dz_right @ right,
// dleft = dz_left^T @ x and dright = dz_right^T @ x.
//
// gated_linear_pair_forward also returns z (..., 2N). The first N columns of z are the result of
// the left matmul, and the last N columns are the result of the right matmul. The matmul kernel
// reads both weights where they are; they are not concatenated.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "core/dispatch.h"
#include "layers/donation.h"
#include "layers/gate.h"

namespace torchweld::gated_linear_pair_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 5>;

// Checks x, the weights and the gate. Returns the shape of y.
std::vector<c10::SymInt> check_inputs(const char* op, const Tensor& x, const Tensor& left,
                                      const Tensor& right, c10::string_view gate) {
  auto sizes = check_linear(op, x, "left", left, std::nullopt);
  check_linear(op, x, "right", right, std::nullopt);
  check_shape(op, "right", right, left.sym_sizes(), "left's shape");
  parse_gate(op, gate);
  return sizes;
}

std::vector<c10::SymInt> gated_linear_pair_checks(const char* op, const Tensor& x,
                                                  const Tensor& left, const Tensor& right,
                                                  const OptionalTensor& left_bias,
                                                  const OptionalTensor& right_bias,
                                                  c10::string_view gate) {
  auto sizes = check_inputs(op, x, left, right, gate);
  check_vector(op, "left_bias", left_bias, left.sym_size(0), "(N,)", x);
  check_vector(op, "right_bias", right_bias, left.sym_size(0), "(N,)", x);
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
  const auto sizes = check_inputs(op, x, left, right, gate);
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

// CPU: returns the result of the left matmul and the result of the right matmul, both (rows, N).
Halves branches(const Tensor& x, const Tensor& left, const Tensor& right,
                const OptionalTensor& left_bias, const OptionalTensor& right_bias) {
  const Tensor rows = as_matrix(x);
  const auto branch = [&](const Tensor& weight, const OptionalTensor& bias) {
    Tensor z = at::empty({rows.size(0), weight.size(0)}, x.options());
    linear_into(z, rows, weight, bias);
    return z;
  };
  return {branch(left, left_bias), branch(right, right_bias)};
}

Tensor gated_linear_pair_cpu(const Tensor& x, const Tensor& left, const Tensor& right,
                             const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                             c10::string_view gate) {
  const Tensor y = gated_linear_pair_meta(x, left, right, left_bias, right_bias, gate);
  const Halves z = branches(x, left, right, left_bias, right_bias);
  return apply_gate(z, parse_gate("gated_linear_pair", gate)).view(y.sizes());
}

Forward gated_linear_pair_forward_cpu(const Tensor& x, const Tensor& left, const Tensor& right,
                                      const OptionalTensor& left_bias,
                                      const OptionalTensor& right_bias, c10::string_view gate) {
  const auto [y, z] = gated_linear_pair_forward_meta(x, left, right, left_bias, right_bias, gate);
  const Halves computed = branches(x, left, right, left_bias, right_bias);
  const Halves saved(as_matrix(z), /*interleaved=*/false);
  saved.left.copy_(computed.left);
  saved.right.copy_(computed.right);
  const Gate parsed = parse_gate("gated_linear_pair_forward", gate);
  return {apply_gate(computed, parsed).view(y.sizes()), z};
}

// CPU: computes to += a @ b.
// NOTE: for float32, the code calls matmul_into_cpu and then adds. matmul_into_cpu uses oneDNN,
// which is twice as fast as addmm_, but can't add to an existing matrix.
void add_matmul_cpu(Tensor& to, const Tensor& a, const Tensor& b) {
  if (to.scalar_type() != at::kFloat) {
    to.addmm_(a, b);
    return;
  }
  Tensor product = at::empty_like(to);
  matmul_into_cpu(product, a, b);
  to.add_(product);
}

Grads gated_linear_pair_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& left,
                                     const Tensor& right, const Tensor& z, c10::string_view gate,
                                     Wanted output_mask) {
  auto [dx, dleft, dright, dleft_bias, dright_bias] =
      gated_linear_pair_backward_meta(dy, x, left, right, z, gate, output_mask);
  const Halves dz = gate_backward(as_matrix(dy), Halves(as_matrix(z.contiguous()), false),
                                  parse_gate("gated_linear_pair_backward", gate));
  const Tensor rows = as_matrix(x);
  linear_backward_into(dx, dleft, dleft_bias, {output_mask[0], output_mask[1], output_mask[3]},
                       dz.left, rows, left);
  linear_backward_into(dx, dright, dright_bias, {false, output_mask[2], output_mask[4]}, dz.right,
                       rows, right);
  if (output_mask[0]) {
    Tensor out = as_matrix(dx);
    add_matmul_cpu(out, dz.right, right);
  }
  return {dx, dleft, dright, dleft_bias, dright_bias};
}

#ifdef TORCHWELD_CUDA
void pair_matmul_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& left,
                      const Tensor& right, const OptionalTensor& left_bias,
                      const OptionalTensor& right_bias, Gate gate) {
  const OnDevice on(x.device());
  OptionalTensor bias;
  if (is_given(left_bias) || is_given(right_bias)) {
    const Tensor& like = is_given(left_bias) ? *left_bias : *right_bias;
    const auto values = [&](const OptionalTensor& t) {
      return is_given(t) ? *t : at::zeros_like(like);
    };
    bias = at::cat({values(left_bias), values(right_bias)});
  }
  gated_matmul_into(y, z, x, Matrix::pair_of(left, right), bias, gate, /*interleaved=*/false);
}

Tensor gated_linear_pair_cuda(const Tensor& x, const Tensor& left, const Tensor& right,
                              const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                              c10::string_view gate) {
  Tensor y = gated_linear_pair_meta(x, left, right, left_bias, right_bias, gate);
  pair_matmul_into(y, {}, x, left, right, left_bias, right_bias,
                   parse_gate("gated_linear_pair", gate));
  return y;
}

Forward gated_linear_pair_forward_cuda(const Tensor& x, const Tensor& left, const Tensor& right,
                                       const OptionalTensor& left_bias,
                                       const OptionalTensor& right_bias, c10::string_view gate) {
  auto [y, z] = gated_linear_pair_forward_meta(x, left, right, left_bias, right_bias, gate);
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
  if (output_mask[0]) {
    const CallScope part("dx");
    matmul_into(rows_of(dx), dz, Matrix::pair_of(left, right).t());
  }
  const int64_t n = left.size(0);
  const auto weight_backward = [&](const char* name, const Tensor& dweight, int64_t first) {
    const CallScope part(name);
    matmul_into(dweight, Matrix(dz.narrow(1, first, n)).t(), rows_of(x).t());
  };
  if (output_mask[1]) weight_backward("dleft", dleft, 0);
  if (output_mask[2]) weight_backward("dright", dright, n);
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
    ctx->saved_data["left_bias"] = is_given(left_bias) && left_bias->requires_grad();
    ctx->saved_data["right_bias"] = is_given(right_bias) && right_bias->requires_grad();
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(6);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &left = saved[1], &right = saved[2];
    const Wanted wanted = {x.requires_grad(), left.requires_grad(), right.requires_grad(),
                           ctx->saved_data["left_bias"].toBool(),
                           ctx->saved_data["right_bias"].toBool()};
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
