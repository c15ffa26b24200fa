// rms_norm_linear:  y = activation((x * rstd * norm_weight) @ weight.T + bias),
//                   rstd = 1 / sqrt(mean(x * x) + eps)
//   x (..., K), weight (N, K), bias (N,), norm_weight (K,), y (..., N)
//
// rms_norm_linear_forward also returns what the gradient needs: the pre-activation (or a (0,)
// tensor, see linear) and rstd (...) in fp32 (fp64 for fp64).
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>

#include "core/dispatch.h"
#include "core/linear_common.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld::rms_norm_linear_room {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

std::vector<c10::SymInt> rms_norm_linear_checks(const char* op, const Tensor& x,
                                                const Tensor& weight, const OptionalTensor& bias,
                                                const OptionalTensor& norm_weight) {
  const auto sizes = check_linear(op, x, "weight", weight, bias);
  check_vector(op, "norm_weight", norm_weight, x.sym_size(-1), "(K,)", x);
  return sizes;
}

Tensor rms_norm_linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& norm_weight, double eps,
                            c10::string_view activation) {
  const char* op = "rms_norm_linear";
  const auto sizes = rms_norm_linear_checks(op, x, weight, bias, norm_weight);
  check_eps(op, eps);
  parse_activation(op, activation);
  return empty_result(x, sizes);
}

Forward rms_norm_linear_forward_meta(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                     double eps, c10::string_view activation) {
  const char* op = "rms_norm_linear_forward";
  const auto sizes = rms_norm_linear_checks(op, x, weight, bias, norm_weight);
  check_eps(op, eps);
  const bool saves = saves_preact(parse_activation(op, activation));
  return {empty_result(x, sizes), saves ? empty_result(x, sizes) : at::empty({0}, x.options()),
          at::empty_symint(without_last(x), x.options().dtype(acc_dtype(x)))};
}

Grads rms_norm_linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& norm_weight, const Tensor& rstd,
                                    const OptionalTensor& preact, c10::string_view activation,
                                    std::array<bool, 4> output_mask) {
  const char* op = "rms_norm_linear_backward";
  const auto sizes = rms_norm_linear_checks(op, x, weight, std::nullopt, norm_weight);
  check_dy(op, dy, sizes, x);
  check_preact(op, preact, parse_activation(op, activation), sizes, x);
  check_statistic(op, "rstd", rstd, x);
  return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
          empty_vector_grad(weight, weight.sym_size(0), output_mask[2]),
          empty_vector_grad(x, x.sym_size(-1), output_mask[3] && is_given(norm_weight))};
}

// CPU. x * rstd in the statistics' dtype, before norm_weight; rstd (...).
Tensor scale_rows(const Tensor& x, const Tensor& rstd) {
  return x.to(rstd.scalar_type()) * rstd.unsqueeze(-1);
}

Tensor normalise(const Tensor& x, const Tensor& rstd, const OptionalTensor& norm_weight) {
  Tensor rows = scale_rows(x, rstd);
  if (is_given(norm_weight)) rows.mul_(*norm_weight);
  return rows.to(x.scalar_type());
}

// CPU. 1 / sqrt(mean(x * x) + eps), shape (...).
Tensor rms_rstd(const Tensor& x, double eps) {
  const Tensor norm =
      at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/false, acc_dtype(x));
  return norm.square_().div_(x.size(-1)).add_(eps).rsqrt_();
}

Tensor rms_norm_linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& norm_weight, double eps,
                           c10::string_view activation) {
  Tensor y = rms_norm_linear_meta(x, weight, bias, norm_weight, eps, activation);
  if (y.numel() == 0) return y;
  linear_into(y, normalise(x, rms_rstd(x, eps), norm_weight), weight, bias);
  activate_into(y, y, parse_activation("rms_norm_linear", activation));
  return y;
}

Forward rms_norm_linear_forward_cpu(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                    double eps, c10::string_view activation) {
  auto [y, preact, rstd] =
      rms_norm_linear_forward_meta(x, weight, bias, norm_weight, eps, activation);
  const Activation act = parse_activation("rms_norm_linear_forward", activation);
  rstd.copy_(rms_rstd(x, eps));
  if (y.numel() == 0) return {y, preact, rstd};
  Tensor& z = saves_preact(act) ? preact : y;
  linear_into(z, normalise(x, rstd, norm_weight), weight, bias);
  activate_into(y, z, act);
  return {y, preact, rstd};
}

Grads rms_norm_linear_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                   const OptionalTensor& norm_weight, const Tensor& rstd,
                                   const OptionalTensor& preact, c10::string_view activation,
                                   std::array<bool, 4> output_mask) {
  auto [dx, dweight, dbias, dnorm_weight] = rms_norm_linear_backward_meta(
      dy, x, weight, norm_weight, rstd, preact, activation, output_mask);
  const Tensor dz = as_matrix(
      activation_backward(dy, preact, parse_activation("rms_norm_linear_backward", activation)));
  const bool wants_rows = output_mask[0] || output_mask[3];
  const Tensor normalised = output_mask[1] ? as_matrix(normalise(x, rstd, norm_weight)) : Tensor();
  Tensor dnormalised = wants_rows ? at::empty(x.sizes(), x.options()) : Tensor();
  linear_backward_into(dnormalised, dweight, dbias, {wants_rows, output_mask[1], output_mask[2]},
                       dz, normalised, weight);
  if (!wants_rows) return {dx, dweight, dbias, dnorm_weight};

  const Tensor scaled = scale_rows(x, rstd);
  Tensor grad = dnormalised.to(rstd.scalar_type());
  if (dnorm_weight.numel() > 0) {
    dnorm_weight.copy_(as_matrix(grad * scaled).sum(0));
  }
  if (output_mask[0] && x.numel() > 0) {
    if (is_given(norm_weight)) grad = grad * *norm_weight;
    const Tensor projection = (grad * scaled).mean(-1, /*keepdim=*/true);
    dx.copy_((grad - scaled * projection).mul_(rstd.unsqueeze(-1)));
  }
  return {dx, dweight, dbias, dnorm_weight};
}

#ifdef TORCHWELD_CUDA
Tensor rms_norm_linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& norm_weight, double eps,
                            c10::string_view activation) {
  Tensor y = rms_norm_linear_meta(x, weight, bias, norm_weight, eps, activation);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  matmul_into(as_matrix(y), norm_rows({/*centred=*/false, norm_weight}, x, eps), weight,
              {bias, parse_activation("rms_norm_linear", activation)});
  return y;
}

Forward rms_norm_linear_forward_cuda(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                     double eps, c10::string_view activation) {
  auto [y, preact, rstd] =
      rms_norm_linear_forward_meta(x, weight, bias, norm_weight, eps, activation);
  const OnDevice on(x.device());
  const Tensor normalised =
      norm_rows({/*centred=*/false, norm_weight}, x, eps, {std::nullopt, rstd});
  if (y.numel() == 0) return {y, preact, rstd};
  MatmulEpilogue epilogue = {bias, parse_activation("rms_norm_linear_forward", activation)};
  if (saves_preact(epilogue.activation)) epilogue.preact = preact;
  matmul_into(as_matrix(y), normalised, weight, epilogue);
  return {y, preact, rstd};
}

Grads rms_norm_linear_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& norm_weight, const Tensor& rstd,
                                    const OptionalTensor& preact, c10::string_view activation,
                                    std::array<bool, 4> output_mask) {
  auto [dx, dweight, dbias, dnorm_weight] = rms_norm_linear_backward_meta(
      dy, x, weight, norm_weight, rstd, preact, activation, output_mask);
  const OnDevice on(x.device());
  const Tensor dz = activation_backward_into(
      dbias, dy, preact, parse_activation("rms_norm_linear_backward", activation));
  const Tensor no_shift = empty_vector_grad(x, 0, /*wanted=*/false);
  norm_matmul_backward_into(dx, dweight, dnorm_weight, no_shift, output_mask[0], output_mask[1],
                            {/*centred=*/false, norm_weight}, dz, x, weight, {std::nullopt, rstd});
  return {dx, dweight, dbias, dnorm_weight};
}
#endif

Tensor call_rms_norm_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& norm_weight, double eps,
                            c10::string_view activation) {
  static const auto op = find_op<decltype(call_rms_norm_linear)>("rms_norm_linear");
  return op.call(x, weight, bias, norm_weight, eps, activation);
}

Forward call_rms_norm_linear_forward(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                     double eps, c10::string_view activation) {
  static const auto op = find_op<decltype(call_rms_norm_linear_forward)>("rms_norm_linear_forward");
  return op.call(x, weight, bias, norm_weight, eps, activation);
}

Grads call_rms_norm_linear_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& norm_weight, const Tensor& rstd,
                                    const OptionalTensor& preact, c10::string_view activation,
                                    std::array<bool, 4> output_mask) {
  static const auto op =
      find_op<decltype(call_rms_norm_linear_backward)>("rms_norm_linear_backward");
  return op.call(dy, x, weight, norm_weight, rstd, preact, activation, output_mask);
}

struct RmsNormLinearFunction : torch::autograd::Function<RmsNormLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& norm_weight,
                               double eps, const std::string& activation) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, preact, rstd] =
        call_rms_norm_linear_forward(x, weight, bias, norm_weight, eps, activation);
    const Activation act = parse_activation("rms_norm_linear", activation);
    const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
    ctx->save_for_backward({x, weight, or_undefined(norm_weight), rstd, saved});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["bias"] = is_given(bias) && bias->requires_grad();
    ctx->mark_non_differentiable({preact, rstd});
    ctx->set_materialize_grads(false);
    return {y, preact, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &norm_weight = saved[2];
    const std::array<bool, 4> wanted = {x.requires_grad(), weight.requires_grad(),
                                        ctx->saved_data["bias"].toBool(),
                                        norm_weight.defined() && norm_weight.requires_grad()};
    auto [dx, dweight, dbias, dnorm_weight] = call_rms_norm_linear_backward(
        grads[0], x, weight, optional(norm_weight), saved[3], optional(saved[4]),
        ctx->saved_data["activation"].toStringRef(), wanted);
    return {if_wanted(wanted[0], dx),
            if_wanted(wanted[1], dweight),
            if_wanted(wanted[2], dbias),
            if_wanted(wanted[3], dnorm_weight),
            Tensor(),
            Tensor()};
  }
};

Forward rms_norm_linear_forward_autograd(const Tensor& x, const Tensor& weight,
                                         const OptionalTensor& bias,
                                         const OptionalTensor& norm_weight, double eps,
                                         c10::string_view activation) {
  if (any_needs_grad(x, weight, bias, norm_weight)) {
    const auto out =
        RmsNormLinearFunction::apply(x, weight, bias, norm_weight, eps, std::string(activation));
    return {out[0], out[1], out[2]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_rms_norm_linear_forward(x, weight, bias, norm_weight, eps, activation);
}

Tensor rms_norm_linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& norm_weight, double eps,
                                c10::string_view activation) {
  if (any_needs_grad(x, weight, bias, norm_weight)) {
    const char* op = "rms_norm_linear";  // refusals name this op, not rms_norm_linear_forward
    rms_norm_linear_checks(op, x, weight, bias, norm_weight);
    check_eps(op, eps);
    parse_activation(op, activation);
    return RmsNormLinearFunction::apply(x, weight, bias, norm_weight, eps,
                                        std::string(activation))[0];
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_rms_norm_linear(x, weight, bias, norm_weight, eps, activation);
}

template <at::DeviceType device>
Tensor rms_norm_linear_autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& norm_weight, double eps,
                                c10::string_view activation) {
  const Autocast<device> cast;
  return call_rms_norm_linear(cast(x), cast(weight), cast(bias), cast(norm_weight), eps,
                              activation);
}

template <at::DeviceType device>
Forward rms_norm_linear_forward_autocast(const Tensor& x, const Tensor& weight,
                                         const OptionalTensor& bias,
                                         const OptionalTensor& norm_weight, double eps,
                                         c10::string_view activation) {
  const Autocast<device> cast;
  return call_rms_norm_linear_forward(cast(x), cast(weight), cast(bias), cast(norm_weight), eps,
                                      activation);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "rms_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, *, "
      "float eps=1e-6, str activation=\"none\") -> Tensor",
      tags);
  m.def(
      "rms_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? norm_weight=None, *, float eps=1e-6, str activation=\"none\") -> "
      "(Tensor y, Tensor preact, Tensor rstd)",
      tags);
  m.def(
      "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? norm_weight, "
      "Tensor rstd, Tensor? preact=None, *, str activation=\"none\", bool[4] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm_weight)",
      tags);
}

TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("rms_norm_linear", rms_norm_linear_meta);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_meta);
  m.impl("rms_norm_linear_backward", rms_norm_linear_backward_meta);
}

TORCH_LIBRARY_IMPL(torchweld, CPU, m) {
  m.impl("rms_norm_linear", rms_norm_linear_cpu);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_cpu);
  m.impl("rms_norm_linear_backward", rms_norm_linear_backward_cpu);
}

TORCH_LIBRARY_IMPL(torchweld, CUDA, m) {
#ifdef TORCHWELD_CUDA
  m.impl("rms_norm_linear", rms_norm_linear_cuda);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_cuda);
  m.impl("rms_norm_linear_backward", rms_norm_linear_backward_cuda);
#else
  m.impl("rms_norm_linear", no_cuda_kernel_function());
  m.impl("rms_norm_linear_forward", no_cuda_kernel_function());
  m.impl("rms_norm_linear_backward", no_cuda_kernel_function());
#endif
}

TORCH_LIBRARY_IMPL(torchweld, Autograd, m) {
  m.impl("rms_norm_linear", rms_norm_linear_autograd);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_autograd);
  m.impl("rms_norm_linear_backward", no_gradient_function());
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("rms_norm_linear", rms_norm_linear_autocast<at::kCPU>);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("rms_norm_linear", rms_norm_linear_autocast<at::kCUDA>);
  m.impl("rms_norm_linear_forward", rms_norm_linear_forward_autocast<at::kCUDA>);
}

}  // namespace
}  // namespace torchweld::rms_norm_linear_room
