// gated_mlp computes
//   y = act @ down.T + down_bias
//   act = gate(x @ left.T + left_bias, x @ right.T + right_bias)
//   x (..., K), left and right (N, K), down (P, N), left_bias and right_bias (N,), down_bias (P,),
//   act (..., N), y (..., P)
// The gates are those of gated_linear.
//
// gated_mlp_forward also returns z (..., 2N), the results of the left and the right matmul side by
// side. The backward computes dz, the gradient of z, from z and dact = dy @ down. Then
//   dx = dz_left @ left + dz_right @ right,  dleft = dz_left^T @ x,  dright = dz_right^T @ x,
//   ddown = dy^T @ act.
// The forward does not keep act for the backward. The backward computes act again from the rounded
// z, in the step that computes dz. On Hopper, the epilogue of dy @ down can compute act and dz.
// dact is then never stored.
#include "core/batch_invariance.h"
#include "core/dispatch.h"
#include "layers/gated_pair.h"

#ifdef TORCHWELD_CUDA
#include "layers/gate_backward_matmul.h"
#endif

namespace torchweld::gated_mlp_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 7>;

void check_inputs(const char* op, const Tensor& x, const Tensor& left, const Tensor& right,
                  const Tensor& down, c10::string_view gate) {
  check_pair(op, x, left, right, gate);
  check_like(op, "down", down, "x", x);
  check_dim(op, "down", down, 2, "(P, N)");
  const auto n = left.sym_size(0);
  TW_CHECK(down.sym_size(1) == n, op, "down must be (P, N) with N = ", n, ", but got ",
           describe(down), transpose_fix("down", down, n));
}

void gated_mlp_checks(const char* op, const Tensor& x, const Tensor& left, const Tensor& right,
                      const Tensor& down, const OptionalTensor& left_bias,
                      const OptionalTensor& right_bias, const OptionalTensor& down_bias,
                      c10::string_view gate) {
  check_inputs(op, x, left, right, down, gate);
  check_pair_biases(op, left_bias, right_bias, left, x);
  check_vector(op, "down_bias", down_bias, down.sym_size(0), "(P,)", x);
}

Tensor empty_y(const Tensor& x, const Tensor& down) {
  return empty_result(x, with_last(x, down.sym_size(0)));
}

Tensor gated_mlp_meta(const Tensor& x, const Tensor& left, const Tensor& right, const Tensor& down,
                      const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                      const OptionalTensor& down_bias, c10::string_view gate) {
  gated_mlp_checks("gated_mlp", x, left, right, down, left_bias, right_bias, down_bias, gate);
  return empty_y(x, down);
}
TW_OP(gated_mlp);

Forward gated_mlp_forward_meta(const Tensor& x, const Tensor& left, const Tensor& right,
                               const Tensor& down, const OptionalTensor& left_bias,
                               const OptionalTensor& right_bias, const OptionalTensor& down_bias,
                               c10::string_view gate) {
  gated_mlp_checks("gated_mlp_forward", x, left, right, down, left_bias, right_bias, down_bias,
                   gate);
  return {empty_y(x, down), empty_result(x, with_last(x, 2 * left.sym_size(0)))};
}
TW_OP(gated_mlp_forward);

Grads gated_mlp_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& left,
                              const Tensor& right, const Tensor& down, const Tensor& z,
                              c10::string_view gate, Wanted output_mask) {
  const char* op = "gated_mlp_backward";
  check_inputs(op, x, left, right, down, gate);
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, with_last(x, down.sym_size(0)), "(..., P)");
  check_like(op, "z", z, "x", x);
  check_shape(op, "z", z, with_last(x, 2 * left.sym_size(0)), "(..., 2N)");
  const auto bias_grad = [&](const Tensor& weight, bool wanted) {
    return empty_vector_grad(weight, weight.sym_size(0), wanted);
  };
  return {empty_input_grad(x, output_mask[0]),      empty_weight_grad(left, output_mask[1]),
          empty_weight_grad(right, output_mask[2]), empty_weight_grad(down, output_mask[3]),
          bias_grad(left, output_mask[4]),          bias_grad(right, output_mask[5]),
          bias_grad(down, output_mask[6])};
}
TW_OP(gated_mlp_backward);

// Whether the caller requests a gradient that depends on dz.
bool wants_dz(const Wanted& wanted) {
  return wanted[0] || wanted[1] || wanted[2] || wanted[4] || wanted[5];
}

Tensor gated_mlp_cpu(const Tensor& x, const Tensor& left, const Tensor& right, const Tensor& down,
                     const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                     const OptionalTensor& down_bias, c10::string_view gate) {
  Tensor y = gated_mlp_meta(x, left, right, down, left_bias, right_bias, down_bias, gate);
  const Halves z = pair_branches(x, left, right, left_bias, right_bias);
  linear_into(y, apply_gate(z, parse_gate("gated_mlp", gate)), down, down_bias);
  return y;
}

Forward gated_mlp_forward_cpu(const Tensor& x, const Tensor& left, const Tensor& right,
                              const Tensor& down, const OptionalTensor& left_bias,
                              const OptionalTensor& right_bias, const OptionalTensor& down_bias,
                              c10::string_view gate) {
  auto [y, z] =
      gated_mlp_forward_meta(x, left, right, down, left_bias, right_bias, down_bias, gate);
  const Halves computed = pair_branches(x, left, right, left_bias, right_bias);
  save_halves(z, computed);
  linear_into(y, apply_gate(computed, parse_gate("gated_mlp_forward", gate)), down, down_bias);
  return {y, z};
}

Grads gated_mlp_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& left,
                             const Tensor& right, const Tensor& down, const Tensor& z,
                             c10::string_view gate, Wanted output_mask) {
  auto [dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias] =
      gated_mlp_backward_meta(dy, x, left, right, down, z, gate, output_mask);
  const bool needs_dz = wants_dz(output_mask);
  const Tensor rows = as_matrix(dy);
  const Halves halves(as_matrix(z.contiguous()), /*interleaved=*/false);
  const Gate parsed = parse_gate("gated_mlp_backward", gate);
  const Tensor act = output_mask[3] ? apply_gate(halves, parsed) : halves.left;
  Tensor dact = at::empty({needs_dz ? rows.size(0) : 0, left.size(0)}, x.options());
  linear_backward_into(dact, ddown, ddown_bias, {needs_dz, output_mask[3], output_mask[6]}, rows,
                       act, down);
  if (needs_dz) {
    const Halves dz = gate_backward(dact, halves, parsed);
    pair_backward_cpu(
        dx, dleft, dright, dleft_bias, dright_bias,
        {output_mask[0], output_mask[1], output_mask[2], output_mask[4], output_mask[5]}, dz, x,
        left, right);
  }
  return {dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias};
}

#ifdef TORCHWELD_CUDA
// Computes y, and z if it is defined.
void gated_mlp_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& left,
                    const Tensor& right, const Tensor& down, const OptionalTensor& left_bias,
                    const OptionalTensor& right_bias, const OptionalTensor& down_bias, Gate gate) {
  const OnDevice on(x.device());
  const Tensor act = empty_matrix(count_rows(x), left.size(0), x);
  {
    const CallScope part("act");
    pair_matmul_into(act, z, x, left, right, left_bias, right_bias, gate);
  }
  const CallScope part("y");
  matmul_into(rows_of(y), rows_of(act), down, {down_bias});
}

Tensor gated_mlp_cuda(const Tensor& x, const Tensor& left, const Tensor& right, const Tensor& down,
                      const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                      const OptionalTensor& down_bias, c10::string_view gate) {
  const Tensor y = gated_mlp_meta(x, left, right, down, left_bias, right_bias, down_bias, gate);
  gated_mlp_into(y, {}, x, left, right, down, left_bias, right_bias, down_bias,
                 parse_gate("gated_mlp", gate));
  return y;
}

Forward gated_mlp_forward_cuda(const Tensor& x, const Tensor& left, const Tensor& right,
                               const Tensor& down, const OptionalTensor& left_bias,
                               const OptionalTensor& right_bias, const OptionalTensor& down_bias,
                               c10::string_view gate) {
  auto [y, z] =
      gated_mlp_forward_meta(x, left, right, down, left_bias, right_bias, down_bias, gate);
  gated_mlp_into(y, z, x, left, right, down, left_bias, right_bias, down_bias,
                 parse_gate("gated_mlp_forward", gate));
  return {y, z};
}

Grads gated_mlp_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& left,
                              const Tensor& right, const Tensor& down, const Tensor& z,
                              c10::string_view gate, Wanted output_mask) {
  auto [dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias] =
      gated_mlp_backward_meta(dy, x, left, right, down, z, gate, output_mask);
  const OnDevice on(x.device());
  const Tensor nothing = dleft_bias.narrow(0, 0, 0);
  const bool beside = bias_beside_weight(output_mask[3], Activation::kNone);
  const Tensor rows =
      activation_backward_into(beside ? nothing : ddown_bias, dy, std::nullopt, Activation::kNone);
  const bool needs_dz = wants_dz(output_mask), needs_act = output_mask[3];
  const Gate parsed = parse_gate("gated_mlp_backward", gate);
  Tensor act = empty_matrix(needs_act ? rows.size(0) : 0, down.size(1), x), dz;
  if (needs_dz) dz = gate_backward_matmul(act, z, rows, down, parsed);
  const bool fused = dz.defined();
  if (!fused && (needs_dz || needs_act)) {
    // The pass over dact and z overwrites dact with act. If only act is needed, dact is
    // uninitialised.
    const Tensor dact = needs_act ? act : empty_matrix(rows.size(0), down.size(1), x);
    if (needs_dz) {
      const CallScope part("dact");
      matmul_into(dact, rows, Matrix(down).t());
    }
    dz = gate_backward_into(dleft_bias, dright_bias, dact, z, parsed, /*interleaved=*/false,
                            /*replaces_dy=*/needs_act);
  }
  if (needs_act) {
    weight_backward_into(ddown, beside ? ddown_bias : nothing, rows, rows_of(act), "ddown");
  }
  if (needs_dz) {
    const auto bias_grad = [&](const Tensor& dbias, const Tensor& dz_half, bool beside_weight) {
      if (!fused || beside_weight) return;
      activation_backward_into(dbias, dz_half, std::nullopt, Activation::kNone);
    };
    const int64_t n = left.size(0);
    bias_grad(dleft_bias, dz.narrow(1, 0, n), output_mask[1]);
    bias_grad(dright_bias, dz.narrow(1, n, n), output_mask[2]);
    pair_backward_into(dx, dleft, dright, fused ? dleft_bias : nothing,
                       fused ? dright_bias : nothing,
                       {output_mask[0], output_mask[1], output_mask[2]}, dz, x, left, right);
  }
  return {dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias};
}
#endif

// The two ops that a recorded forward calls. GatedMlpFunction::forward calls PairForward.
// FinishFunction later calls Linear. If gated_mlp is the last op of a checkpointed region, this
// order saves the recomputation of Linear.
constexpr struct PairForward
    : OpCall<PairForward, std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                     const OptionalTensor&, const OptionalTensor&,
                                                     c10::string_view)> {
  static constexpr const char* kName = "gated_linear_pair_forward";
} call_gated_linear_pair_forward{};
constexpr struct Linear : OpCall<Linear, Tensor(const Tensor&, const Tensor&, const OptionalTensor&,
                                                c10::string_view)> {
  static constexpr const char* kName = "linear";
} call_linear{};

struct GatedMlpFunction : torch::autograd::Function<GatedMlpFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& left,
                               const Tensor& right, const Tensor& down,
                               const OptionalTensor& left_bias, const OptionalTensor& right_bias,
                               const OptionalTensor& down_bias, c10::string_view gate) {
    auto [act, z] =
        call_gated_linear_pair_forward.below(x, left, right, left_bias, right_bias, gate);
    ctx->save_for_backward({x, left, right, down, z});
    Donation::prepare(ctx);
    ctx->saved_data["gate"] = gate;
    ctx->saved_data["left_bias"] = is_given(left_bias);
    ctx->saved_data["right_bias"] = is_given(right_bias);
    ctx->saved_data["down_bias"] = is_given(down_bias);
    return outputs_of(ctx, {placeholder(x, with_last(x, down.sym_size(0))), z, act});
  }

  static Tensor finish(const variable_list& outputs, const Tensor&, const Tensor&, const Tensor&,
                       const Tensor& down, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor& down_bias, c10::string_view) {
    return call_linear(outputs[2], down, down_bias, "none");
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(8);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &left = saved[1], &right = saved[2], &down = saved[3];
    AskedGradients asked(ctx);
    const Wanted wanted = {asked.next(),
                           asked.next(),
                           asked.next(),
                           asked.next(),
                           asked.next(ctx->saved_data["left_bias"].toBool()),
                           asked.next(ctx->saved_data["right_bias"].toBool()),
                           asked.next(ctx->saved_data["down_bias"].toBool())};
    const Donation z(ctx, saved[4], grads[0]);
    auto [dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias] = call_gated_mlp_backward(
        grads[0], x, left, right, down, saved[4], ctx->saved_data["gate"].toStringRef(), wanted);
    const Tensor results[] = {dx, dleft, dright, ddown, dleft_bias, dright_bias, ddown_bias};
    for (size_t i = 0; i < wanted.size(); ++i) all[i] = if_wanted(wanted[i], results[i]);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string name = "gated_mlp";
  const std::string inputs =
      "(Tensor x, Tensor left, Tensor right, Tensor down, Tensor? left_bias=None, "
      "Tensor? right_bias=None, Tensor? down_bias=None, *, str gate=\"swiglu\") -> ";
  define_op(m, name + inputs + "Tensor", TW_KERNELS(gated_mlp),
            recorded_by<GatedMlpFunction>(call_gated_mlp, gated_mlp_checks));
  define_op(m, name + "_forward" + inputs + "(Tensor y, Tensor z)", TW_KERNELS(gated_mlp_forward),
            recorded_by<GatedMlpFunction>(call_gated_mlp_forward, gated_mlp_checks));
  define_op(m,
            name +
                "_backward(Tensor dy, Tensor x, Tensor left, Tensor right, Tensor down, Tensor z, "
                "*, str gate=\"swiglu\", bool[7] output_mask) -> "
                "(Tensor dx, Tensor dleft, Tensor dright, Tensor ddown, Tensor dleft_bias, "
                "Tensor dright_bias, Tensor ddown_bias)",
            TW_KERNELS(gated_mlp_backward), no_gradient_function());
  define_autocast(m, call_gated_mlp);
  define_autocast(m, call_gated_mlp_forward);
}

}  // namespace
}  // namespace torchweld::gated_mlp_op
