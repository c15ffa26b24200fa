// linear:  y = activation(x @ weight.T + bias)
//   x (..., K), weight (N, K), bias (N,), y (..., N)
//
// linear_forward also returns z, the pre-activation, for the backward. If the gradient of the
// activation does not need z (none, relu), linear_forward returns a tensor of size (0,) instead.
//
// _linear_part writes y and the pre-activation into existing tensors. These are some rows of larger
// tensors. Other rows of x may still be arriving at that time
// (python/torchweld/distributed/overlap.py). x, y and the pre-activation may have a leading batch
// dim. _linear_part has no gradient.
//
// linear_backward begins with _activation_backward, which computes dz and the sum of dz over the
// rows.
#include "core/dispatch.h"
#include "layers/linear_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld::linear_op {
namespace {

using Grads3 = std::tuple<Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> linear_alloc(const char* op, const Tensor& x, const Tensor& weight,
                                        const OptionalTensor& bias, Activation activation,
                                        bool with_preact) {
  const auto sizes = check_linear(op, x, "weight", weight, bias);
  const bool saves = with_preact && saves_preact(activation);
  return {empty_result(x, sizes), saves ? empty_result(x, sizes) : at::empty({0}, x.options())};
}

Tensor linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   c10::string_view activation) {
  return std::get<0>(
      linear_alloc("linear", x, weight, bias, parse_activation("linear", activation), false));
}

std::tuple<Tensor, Tensor> linear_forward_meta(const Tensor& x, const Tensor& weight,
                                               const OptionalTensor& bias,
                                               c10::string_view activation) {
  const char* op = "linear_forward";
  return linear_alloc(op, x, weight, bias, parse_activation(op, activation), true);
}

Grads3 linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                            const OptionalTensor& preact, c10::string_view activation,
                            std::array<bool, 3> output_mask) {
  const char* op = "linear_backward";
  const auto sizes = check_linear(op, x, "weight", weight, std::nullopt);
  check_dy(op, dy, sizes, x);
  check_preact(op, preact, parse_activation(op, activation), sizes, x);
  return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
          empty_vector_grad(weight, weight.sym_size(0), output_mask[2])};
}

Tensor linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                  c10::string_view activation) {
  Tensor y = linear_meta(x, weight, bias, activation);
  linear_into(y, x, weight, bias, parse_activation("linear", activation));
  return y;
}

std::tuple<Tensor, Tensor> linear_forward_cpu(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias,
                                              c10::string_view activation) {
  auto [y, preact] = linear_forward_meta(x, weight, bias, activation);
  const Activation act = parse_activation("linear_forward", activation);
  if (saves_preact(act)) {
    linear_into(preact, x, weight, bias);
    activate_into(y, preact, act);
  } else {
    linear_into(y, x, weight, bias, act);
  }
  return {y, preact};
}

Grads3 linear_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                           const OptionalTensor& preact, c10::string_view activation,
                           std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = linear_backward_meta(dy, x, weight, preact, activation, output_mask);
  const Tensor dz =
      activation_backward(dy, preact, parse_activation("linear_backward", activation));
  linear_backward_into(dx, dweight, dbias, output_mask, as_matrix(dz), as_matrix(x), weight);
  return {dx, dweight, dbias};
}

void _linear_part_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& y, const OptionalTensor& preact, c10::string_view activation) {
  const char* op = "_linear_part";
  const auto sizes = check_linear(op, x, "weight", weight, bias);
  parse_activation(op, activation);
  const auto check = [&](const char* name, const Tensor& t) {
    check_like(op, name, t, "x", x);
    check_shape(op, name, t, sizes, "(..., N)");
    const bool matrices = t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2);
    TW_CHECK(matrices || t.is_contiguous(), op, name,
             " must be contiguous, or a batch of contiguous matrices, but got ", describe(t),
             " with strides ", t.strides(), "; give whole rows");
  };
  check("y", y);
  if (!is_given(preact)) return;
  check("preact", *preact);
  TW_CHECK(preact->strides() == y.strides(), op, "preact must have y's strides ", y.strides(),
           ", but got ", preact->strides());
}

void _linear_part_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                      const Tensor& y, const OptionalTensor& preact, c10::string_view activation) {
  _linear_part_meta(x, weight, bias, y, preact, activation);
  if (!is_given(preact)) {
    y.copy_(linear_cpu(x, weight, bias, activation));
    return;
  }
  Tensor z = linear_cpu(x, weight, bias, "none");
  preact->copy_(z);
  activate_into(z, z, parse_activation("_linear_part", activation));
  y.copy_(z);
}

std::tuple<Tensor, Tensor> _activation_backward_meta(const Tensor& dy, const OptionalTensor& preact,
                                                     c10::string_view activation, bool sums) {
  const char* op = "_activation_backward";
  const Activation act = parse_activation(op, activation);
  check_floating(op, "dy", dy);
  check_min_dim(op, "dy", dy, 1, "(..., N)");
  check_preact(op, preact, act, dy.sym_sizes(), dy);
  return {needs_preact(act) ? at::empty_symint(dy.sym_sizes(), dy.options())
                            : at::empty({0}, dy.options()),
          empty_vector_grad(dy, dy.sym_size(-1), sums)};
}

std::tuple<Tensor, Tensor> _activation_backward_cpu(const Tensor& dy, const OptionalTensor& preact,
                                                    c10::string_view activation, bool sums) {
  auto [dz, dbias] = _activation_backward_meta(dy, preact, activation, sums);
  const Activation act = parse_activation("_activation_backward", activation);
  if (needs_preact(act)) dz = activation_backward(dy, preact, act).contiguous();
  if (sums) sum_into(dbias, as_matrix(needs_preact(act) ? dz : dy), 0);
  return {dz, dbias};
}

#ifdef TORCHWELD_CUDA
std::tuple<Tensor, Tensor> _activation_backward_cuda(const Tensor& dy, const OptionalTensor& preact,
                                                     c10::string_view activation, bool sums) {
  auto [dz, dbias] = _activation_backward_meta(dy, preact, activation, sums);
  const OnDevice on(dy.device());
  const Activation act = parse_activation("_activation_backward", activation);
  const Tensor rows = activation_backward_into(dbias, dy, preact, act);
  if (needs_preact(act)) dz = rows.view_symint(dy.sym_sizes());
  return {dz, dbias};
}

void _linear_part_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& y, const OptionalTensor& preact, c10::string_view activation) {
  _linear_part_meta(x, weight, bias, y, preact, activation);
  if (y.numel() == 0) return;
  const OnDevice on(x.device());
  MatmulEpilogue epilogue = {bias, parse_activation("_linear_part", activation)};
  if (is_given(preact)) epilogue.preact = *preact;
  // Run one tall matmul if it needs no copy. A tall matmul fills its tiles better than several
  // short matmuls.
  const bool tall = y.is_contiguous() && (row_stride_of(x) || x.dim() != 3);
  if (tall) {
    matmul_into(rows_of(y), rows_of(x), weight, epilogue);
  } else {
    matmul_into(y, x, weight, epilogue);
  }
}

Tensor linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   c10::string_view activation) {
  Tensor y = linear_meta(x, weight, bias, activation);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  matmul_into(rows_of(y), rows_of(x), weight, {bias, parse_activation("linear", activation)});
  return y;
}

std::tuple<Tensor, Tensor> linear_forward_cuda(const Tensor& x, const Tensor& weight,
                                               const OptionalTensor& bias,
                                               c10::string_view activation) {
  auto [y, preact] = linear_forward_meta(x, weight, bias, activation);
  if (y.numel() == 0) return {y, preact};
  const OnDevice on(x.device());
  MatmulEpilogue epilogue = {bias, parse_activation("linear_forward", activation)};
  if (saves_preact(epilogue.activation)) epilogue.preact = preact;
  matmul_into(rows_of(y), rows_of(x), weight, epilogue);
  return {y, preact};
}

Grads3 linear_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                            const OptionalTensor& preact, c10::string_view activation,
                            std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = linear_backward_meta(dy, x, weight, preact, activation, output_mask);
  const OnDevice on(x.device());
  const Activation act = parse_activation("linear_backward", activation);
  const bool beside = bias_beside_weight(output_mask[1], act);
  const Tensor nothing = dbias.narrow(0, 0, 0);
  const Tensor dz = activation_backward_into(beside ? nothing : dbias, dy, preact, act);
  matmul_backward_into(dx, dweight, beside ? dbias : nothing, output_mask[0], output_mask[1], dz, x,
                       weight);
  return {dx, dweight, dbias};
}
#endif

TW_OP(linear);
TW_OP(linear_forward);
TW_OP(linear_backward);

// Raises an error if a tensor needs a gradient. The error can't be raised in a later backward: the
// graph has no node for _linear_part, because _linear_part writes into existing tensors.
void linear_part_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& y, const OptionalTensor& preact,
                          c10::string_view activation) {
  check_no_tangent("_linear_part", x, weight, bias, y, preact);
  TW_CHECK(!any_needs_grad(x, weight, bias, y, preact), "_linear_part",
           "its tensors must need no gradient, but one does; use torch.no_grad()");
  static const auto op = find_op<decltype(_linear_part_meta)>("_linear_part");
  at::AutoDispatchBelowADInplaceOrView guard;
  op.call(x, weight, bias, y, preact, activation);
  y.unsafeGetTensorImpl()->bump_version();
  if (is_given(preact)) preact->unsafeGetTensorImpl()->bump_version();
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, c10::string_view activation) {
    auto [y, preact] = call_linear_forward.below(x, weight, bias, activation);
    const Activation act = parse_activation("linear", activation);
    const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
    ctx->save_for_backward({x, weight, saved});
    Donation::prepare(ctx);
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["bias"] = is_given(bias);
    return outputs_of(ctx, {y, preact});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    AskedGradients asked(ctx);
    const std::array<bool, 3> wanted = {asked.next(), asked.next(),
                                        asked.next(ctx->saved_data["bias"].toBool())};
    const Donation preact(ctx, saved[2], grads[0]);
    auto [dx, dweight, dbias] =
        call_linear_backward(grads[0], x, weight, optional(saved[2]),
                             ctx->saved_data["activation"].toStringRef(), wanted);
    return {if_wanted(wanted[0], dx), if_wanted(wanted[1], dweight), if_wanted(wanted[2], dbias),
            Tensor()};
  }
};

// Checks the arguments before linear_forward checks them, so that errors name linear instead of
// linear_forward.
void linear_checks(const char* op, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& bias, c10::string_view activation) {
  check_linear(op, x, "weight", weight, bias);
  parse_activation(op, activation);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(
      m, "linear(Tensor x, Tensor weight, Tensor? bias=None, *, str activation=\"none\") -> Tensor",
      TW_KERNELS(linear), recorded_by<LinearFunction>(call_linear, linear_checks));
  define_op(
      m,
      "linear_forward(Tensor x, Tensor weight, Tensor? bias=None, *, str activation=\"none\") -> "
      "(Tensor y, Tensor preact)",
      TW_KERNELS(linear_forward), recorded_by<LinearFunction>(call_linear_forward));
  define_op(m,
            "linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? preact=None, *, "
            "str activation=\"none\", bool[3] output_mask) -> "
            "(Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_backward), no_gradient_function());
  define_op(m,
            "_linear_part(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) y, Tensor(b!)? "
            "preact=None, *, str activation=\"none\") -> ()",
            TW_KERNELS(_linear_part), torch::CppFunction(linear_part_autograd));
  define_op(m,
            "_activation_backward(Tensor dy, Tensor? preact=None, *, str activation=\"none\", "
            "bool sums) -> (Tensor dz, Tensor dbias)",
            TW_KERNELS(_activation_backward), no_gradient_function());
  define_autocast(m, call_linear);
  define_autocast(m, call_linear_forward);
}

}  // namespace
}  // namespace torchweld::linear_op
