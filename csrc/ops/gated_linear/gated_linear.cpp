// gated_linear:  z = x @ weight.T + bias,  y = gate(left, right) of z's two halves
//   x (..., K), weight (2N, K), bias (2N,), z (..., 2N), y (..., N)
//   left is the first half of z and right the second (interleaved: the even and the odd columns)
//   sigmoid_tanh: sigmoid(left) * tanh(right)     geglu, geglu_tanh: left * gelu(right)
//   swiglu: silu(left) * right                    reglu: left * relu(right)
//
// gated_linear_forward also returns z, which the backward needs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>

#include "core/dispatch.h"
#include "layers/linear_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld::gated_linear_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;

Gate parse_gate(const char* op, std::string_view name) {
  if (name == "sigmoid_tanh") return Gate::kSigmoidTanh;
  if (name == "geglu") return Gate::kGeglu;
  if (name == "geglu_tanh") return Gate::kGegluTanh;
  if (name == "swiglu") return Gate::kSwiglu;
  if (name == "reglu") return Gate::kReglu;
  TW_CHECK(false, op,
           "gate must be one of sigmoid_tanh, geglu, geglu_tanh, swiglu, reglu, but got '", name,
           "'");
}

// Checks the arguments and returns the sizes of z.
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

// CPU: the two halves of z (rows, 2N) as views (rows, N).
struct Halves {
  Tensor left, right;
  Halves(const Tensor& z, bool interleaved) {
    const int64_t n = z.size(1) / 2;
    const Tensor pairs = interleaved ? z.view({z.size(0), n, 2}) : z.view({z.size(0), 2, n});
    left = pairs.select(interleaved ? 2 : 1, 0);
    right = pairs.select(interleaved ? 2 : 1, 1);
  }
};

Tensor apply_gate(const Halves& z, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh:
      return at::sigmoid(z.left).mul_(at::tanh(z.right));
    case Gate::kGeglu:
      return at::gelu(z.right, "none").mul_(z.left);
    case Gate::kGegluTanh:
      return at::gelu(z.right, "tanh").mul_(z.left);
    case Gate::kSwiglu:
      return at::silu(z.left).mul_(z.right);
    default:
      return at::relu(z.right).mul_(z.left);
  }
}

// CPU: returns the gradients of the two halves of z, computed from dy (rows, N).
std::pair<Tensor, Tensor> gate_backward(const Tensor& dy, const Halves& z, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh: {
      const Tensor s = at::sigmoid(z.left), t = at::tanh(z.right);
      return {at::sigmoid_backward(dy * t, s), at::tanh_backward(dy * s, t)};
    }
    case Gate::kGeglu:
    case Gate::kGegluTanh: {
      const char* approximate = gate == Gate::kGeglu ? "none" : "tanh";
      return {at::gelu(z.right, approximate).mul_(dy),
              at::gelu_backward(dy * z.left, z.right, approximate)};
    }
    case Gate::kSwiglu:
      return {at::silu_backward(dy * z.right, z.left), at::silu(z.left).mul_(dy)};
    default:
      return {at::relu(z.right).mul_(dy), at::threshold_backward(dy * z.left, z.right, 0)};
  }
}

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
  const auto [dleft, dright] = gate_backward(as_matrix(dy), Halves(rows_z, interleaved),
                                             parse_gate("gated_linear_backward", gate));
  const Tensor dz = Donation::gives(z) ? rows_z : at::empty(rows_z.sizes(), rows_z.options());
  const Halves to(dz, interleaved);
  to.left.copy_(dleft);
  to.right.copy_(dright);
  linear_backward_into(dx, dweight, dbias, output_mask, dz, as_matrix(x), weight);
  return {dx, dweight, dbias};
}

#ifdef TORCHWELD_CUDA
// If z is defined, also stores z.
void gated_matmul_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& weight,
                       const OptionalTensor& bias, Gate gate, bool interleaved) {
  if (y.numel() == 0) return;
  const OnDevice on(x.device());
  matmul_into(rows_of(y), rows_of(x), weight,
              {bias, Activation::kNone, /*gated=*/true, gate, interleaved, z});
}

Tensor gated_linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         c10::string_view gate, bool interleaved) {
  Tensor y = gated_linear_meta(x, weight, bias, gate, interleaved);
  gated_matmul_into(y, {}, x, weight, bias, parse_gate("gated_linear", gate), interleaved);
  return y;
}

Forward gated_linear_forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  c10::string_view gate, bool interleaved) {
  auto [y, z] = gated_linear_forward_meta(x, weight, bias, gate, interleaved);
  gated_matmul_into(y, z, x, weight, bias, parse_gate("gated_linear_forward", gate), interleaved);
  return {y, z};
}

// Returns dz (rows, 2N), which overwrites z if z is donated. dbias receives the sum of dz over the
// rows, unless it has size (0,).
Tensor gate_backward_into(const Tensor& dbias, const Tensor& dy, const Tensor& z, Gate gate,
                          bool interleaved) {
  const Tensor dz = matrix_over(z);
  if (z.numel() == 0) {
    dbias.zero_();
    return dz;
  }
  const Rows in_dy(dy), in_z(z);
  const Tensor partials =
      dbias.numel() > 0 ? empty_floats(2 * column_partials(in_dy.rows, in_dy.n), dy) : Tensor();
  launch_gate_backward(
      {in_dy.tensor.const_data_ptr(), in_z.tensor.const_data_ptr(), dz.mutable_data_ptr(),
       data_if_wanted(dbias), data_if_wanted<float>(partials), in_dy.rows, in_dy.n,
       in_dy.row_stride, in_z.row_stride, dz.stride(0), gate, interleaved, dtype_of(z)},
      current_stream());
  return dz;
}

Grads gated_linear_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                 const Tensor& z, c10::string_view gate, bool interleaved,
                                 std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] =
      gated_linear_backward_meta(dy, x, weight, z, gate, interleaved, output_mask);
  const OnDevice on(x.device());
  const Tensor dz =
      gate_backward_into(dbias, dy, z, parse_gate("gated_linear_backward", gate), interleaved);
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
    ctx->saved_data["bias"] = is_given(bias) && bias->requires_grad();
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const std::array<bool, 3> wanted = {x.requires_grad(), weight.requires_grad(),
                                        ctx->saved_data["bias"].toBool()};
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
