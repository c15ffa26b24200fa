// gated_linear computes z = x @ weight.T + bias and y = gate(left, right).
//   x (..., K), weight (2N, K), bias (2N,), z (..., 2N), y (..., N)
// If `interleaved` is false, `left` is the first half of the columns of z, and `right` is the
// second half. If `interleaved` is true, `left` has the even columns and `right` has the odd
// columns. The gates are:
//   sigmoid_tanh: sigmoid(left) * tanh(right)     geglu, geglu_tanh: left * gelu(right)
//   swiglu: silu(left) * right                    reglu: left * relu(right)
//
// gated_linear_forward also returns z, which the backward needs.
#include "core/dispatch.h"
#include "layers/donation.h"
#include "layers/gate.h"

namespace torchweld::gated_linear_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;

// Checks the arguments. Returns the shape of z.
std::vector<c10::SymInt> gated_linear_checks(const char* op, const Tensor& x, const Tensor& weight,
                                             const OptionalTensor& bias, c10::string_view gate,
                                             bool interleaved) {
  check_floating(op, "x", x);
  check_min_dim(op, "x", x, 1, "(..., K)");
  check_like(op, "weight", weight, "x", x);
  check_dim(op, "weight", weight, 2, "(2N, K)");
  const auto k = x.sym_size(-1);
  TW_CHECK(weight.sym_size(0) % 2 == 0 && weight.sym_size(1) == k, op,
           "weight must be (2N, K) with K = ", k, " and an even number of rows, but got ",
           describe(weight), transpose_fix("weight", weight, k));
  check_vector(op, "bias", bias, weight.sym_size(0), "(2N,)", x);
  parse_gate(op, gate);
  return with_last(x, weight.sym_size(0));
}

Tensor gated_linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         c10::string_view gate, bool interleaved) {
  gated_linear_checks("gated_linear", x, weight, bias, gate, interleaved);
  return empty_result(x, with_last(x, weight.sym_size(0) / 2));
}
TW_OP(gated_linear);

Forward gated_linear_forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  c10::string_view gate, bool interleaved) {
  const auto z_sizes =
      gated_linear_checks("gated_linear_forward", x, weight, bias, gate, interleaved);
  return {empty_result(x, with_last(x, weight.sym_size(0) / 2)), empty_result(x, z_sizes)};
}
TW_OP(gated_linear_forward);

Grads gated_linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                 const Tensor& z, c10::string_view gate, bool interleaved,
                                 std::array<bool, 3> output_mask) {
  const char* op = "gated_linear_backward";
  const auto z_sizes = gated_linear_checks(op, x, weight, std::nullopt, gate, interleaved);
  check_dy(op, dy, with_last(x, weight.sym_size(0) / 2), x);
  check_like(op, "z", z, "x", x);
  check_shape(op, "z", z, z_sizes, "(..., 2N)");
  return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
          empty_vector_grad(weight, weight.sym_size(0), output_mask[2])};
}
TW_OP(gated_linear_backward);

void gated_linear_into(Tensor& y, Tensor& z, const Tensor& x, const Tensor& weight,
                       const OptionalTensor& bias, Gate gate, bool interleaved) {
  linear_into(z, x, weight, bias);
  as_matrix(y).copy_(apply_gate(Halves(as_matrix(z), interleaved), gate));
}

Tensor gated_linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        c10::string_view gate, bool interleaved) {
  Tensor y = gated_linear_meta(x, weight, bias, gate, interleaved);
  Tensor z = empty_result(x, with_last(x, weight.size(0)));
  gated_linear_into(y, z, x, weight, bias, parse_gate("gated_linear", gate), interleaved);
  return y;
}

Forward gated_linear_forward_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                 c10::string_view gate, bool interleaved) {
  auto [y, z] = gated_linear_forward_meta(x, weight, bias, gate, interleaved);
  gated_linear_into(y, z, x, weight, bias, parse_gate("gated_linear_forward", gate), interleaved);
  return {y, z};
}

Grads gated_linear_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                const Tensor& z, c10::string_view gate, bool interleaved,
                                std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] =
      gated_linear_backward_meta(dy, x, weight, z, gate, interleaved, output_mask);
  const Tensor rows_z = as_matrix(z.contiguous());
  const Halves grads = gate_backward(as_matrix(dy), Halves(rows_z, interleaved),
                                     parse_gate("gated_linear_backward", gate));
  const Tensor dz = Donation::gives(z) ? rows_z : at::empty(rows_z.sizes(), rows_z.options());
  const Halves to(dz, interleaved);
  to.left.copy_(grads.left);
  to.right.copy_(grads.right);
  linear_backward_into(dx, dweight, dbias, output_mask, dz, as_matrix(x), weight);
  return {dx, dweight, dbias};
}

#ifdef TORCHWELD_CUDA
Tensor gated_linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         c10::string_view gate, bool interleaved) {
  Tensor y = gated_linear_meta(x, weight, bias, gate, interleaved);
  const OnDevice on(x.device());
  gated_matmul_into(y, {}, x, Matrix::halves(weight, interleaved), bias,
                    parse_gate("gated_linear", gate), interleaved);
  return y;
}

Forward gated_linear_forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  c10::string_view gate, bool interleaved) {
  auto [y, z] = gated_linear_forward_meta(x, weight, bias, gate, interleaved);
  const OnDevice on(x.device());
  gated_matmul_into(y, z, x, Matrix::halves(weight, interleaved), bias,
                    parse_gate("gated_linear_forward", gate), interleaved);
  return {y, z};
}

Grads gated_linear_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                 const Tensor& z, c10::string_view gate, bool interleaved,
                                 std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] =
      gated_linear_backward_meta(dy, x, weight, z, gate, interleaved, output_mask);
  const OnDevice on(x.device());
  // If the columns are interleaved, gate_backward_into writes all column sums of dz to one vector.
  // Otherwise it writes the sums of the left columns to the first half of dbias, and the sums of
  // the right columns to the second half.
  const int64_t left = interleaved ? dbias.numel() : dbias.numel() / 2;
  const Tensor dz =
      gate_backward_into(dbias.narrow(0, 0, left), dbias.narrow(0, left, dbias.numel() - left), dy,
                         z, parse_gate("gated_linear_backward", gate), interleaved);
  const Tensor nothing = dbias.narrow(0, 0, 0);
  matmul_backward_into(dx, dweight, nothing, output_mask[0], output_mask[1], dz, x, weight);
  return {dx, dweight, dbias};
}
#endif

struct GatedLinearFunction : torch::autograd::Function<GatedLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, c10::string_view gate,
                               bool interleaved) {
    auto [y, z] = call_gated_linear_forward.below(x, weight, bias, gate, interleaved);
    ctx->save_for_backward({x, weight, z});
    Donation::prepare(ctx);
    ctx->saved_data["gate"] = gate;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["bias"] = is_given(bias);
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    AskedGradients asked(ctx);
    const std::array<bool, 3> wanted = {asked.next(), asked.next(),
                                        asked.next(ctx->saved_data["bias"].toBool())};
    const Donation z(ctx, saved[2], grads[0]);
    auto [dx, dweight, dbias] = call_gated_linear_backward(
        grads[0], x, weight, saved[2], ctx->saved_data["gate"].toStringRef(),
        ctx->saved_data["interleaved"].toBool(), wanted);
    return {if_wanted(wanted[0], dx), if_wanted(wanted[1], dweight), if_wanted(wanted[2], dbias),
            Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m,
            "gated_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str gate=\"geglu\", "
            "bool interleaved=False) -> Tensor",
            TW_KERNELS(gated_linear),
            recorded_by<GatedLinearFunction>(call_gated_linear, gated_linear_checks));
  define_op(
      m,
      "gated_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, *, str gate=\"geglu\", "
      "bool interleaved=False) -> (Tensor y, Tensor z)",
      TW_KERNELS(gated_linear_forward),
      recorded_by<GatedLinearFunction>(call_gated_linear_forward));
  define_op(m,
            "gated_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor z, *, "
            "str gate=\"geglu\", bool interleaved=False, bool[3] output_mask) -> "
            "(Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(gated_linear_backward), no_gradient_function());
  define_autocast(m, call_gated_linear);
  define_autocast(m, call_gated_linear_forward);
}

}  // namespace
}  // namespace torchweld::gated_linear_op
