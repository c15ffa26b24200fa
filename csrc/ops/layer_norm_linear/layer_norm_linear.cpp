// layer_norm_linear:  y = activation(normed @ weight.T + bias),
//                     normed = layer_norm(x, (K,), ln_weight, ln_bias, eps)
//   x (..., K), weight (N, K), bias (N,), ln_weight and ln_bias (K,), y (..., N)
//
// layer_norm_linear_forward also returns what the gradient needs: the pre-activation (or a (0,)
// tensor, see linear), and mean and rstd (...) in fp32 (fp64 for fp64). The normalised rows are
// recomputed from them, so that they are not kept between forward and backward.
#include <ATen/TensorOperators.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>

#include "core/dispatch.h"
#include "core/linear_common.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld::layer_norm_linear_room {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

std::vector<c10::SymInt> layer_norm_linear_checks(const char* op, const Tensor& x,
                                                  const Tensor& weight, const OptionalTensor& bias,
                                                  const OptionalTensor& ln_weight,
                                                  const OptionalTensor& ln_bias) {
  const auto sizes = check_linear(op, x, "weight", weight, bias);
  check_vector(op, "ln_weight", ln_weight, x.sym_size(-1), "(K,)", x);
  check_vector(op, "ln_bias", ln_bias, x.sym_size(-1), "(K,)", x);
  return sizes;
}

Tensor layer_norm_linear_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                              double eps, c10::string_view activation) {
  const char* op = "layer_norm_linear";
  const auto sizes = layer_norm_linear_checks(op, x, weight, bias, ln_weight, ln_bias);
  check_eps(op, eps);
  parse_activation(op, activation);
  return empty_result(x, sizes);
}

Forward layer_norm_linear_forward_meta(const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& bias, const OptionalTensor& ln_weight,
                                       const OptionalTensor& ln_bias, double eps,
                                       c10::string_view activation) {
  const char* op = "layer_norm_linear_forward";
  const auto sizes = layer_norm_linear_checks(op, x, weight, bias, ln_weight, ln_bias);
  check_eps(op, eps);
  const bool saves = saves_preact(parse_activation(op, activation));
  const auto statistics = x.options().dtype(acc_dtype(x));
  return {empty_result(x, sizes), saves ? empty_result(x, sizes) : at::empty({0}, x.options()),
          at::empty_symint(without_last(x), statistics),
          at::empty_symint(without_last(x), statistics)};
}

Grads layer_norm_linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& ln_weight,
                                      const OptionalTensor& ln_bias, const Tensor& mean,
                                      const Tensor& rstd, const OptionalTensor& preact,
                                      c10::string_view activation,
                                      std::array<bool, 5> output_mask) {
  const char* op = "layer_norm_linear_backward";
  const auto sizes = layer_norm_linear_checks(op, x, weight, std::nullopt, ln_weight, ln_bias);
  check_dy(op, dy, sizes, x);
  check_preact(op, preact, parse_activation(op, activation), sizes, x);
  check_statistic(op, "mean", mean, x);
  check_statistic(op, "rstd", rstd, x);
  return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
          empty_vector_grad(weight, weight.sym_size(0), output_mask[2]),
          empty_vector_grad(x, x.sym_size(-1), output_mask[3] && is_given(ln_weight)),
          empty_vector_grad(x, x.sym_size(-1), output_mask[4] && is_given(ln_bias))};
}

// CPU. ATen keeps the statistics of half-precision rows in fp32 only beside fp32 parameters.
OptionalTensor statistics_parameter(const OptionalTensor& t) {
  return is_given(t) ? OptionalTensor(t->to(acc_dtype(*t))) : std::nullopt;
}

Tensor scale_parameter(const Tensor& x, const OptionalTensor& ln_weight) {
  const auto dtype = acc_dtype(x);
  return is_given(ln_weight) ? ln_weight->to(dtype)
                             : at::ones({x.size(-1)}, x.options().dtype(dtype));
}

// CPU. (normalised, mean, rstd); the statistics are (..., 1).
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const OptionalTensor& ln_weight,
                                              const OptionalTensor& ln_bias, double eps) {
  return at::native_layer_norm(x, {x.size(-1)}, scale_parameter(x, ln_weight),
                               statistics_parameter(ln_bias), eps);
}

Tensor layer_norm_linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                             double eps, c10::string_view activation) {
  Tensor y = layer_norm_linear_meta(x, weight, bias, ln_weight, ln_bias, eps, activation);
  if (y.numel() == 0) return y;
  linear_into(y, std::get<0>(layer_norm(x, ln_weight, ln_bias, eps)), weight, bias);
  activate_into(y, y, parse_activation("layer_norm_linear", activation));
  return y;
}

Forward layer_norm_linear_forward_cpu(const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& ln_weight,
                                      const OptionalTensor& ln_bias, double eps,
                                      c10::string_view activation) {
  auto [y, preact, mean, rstd] =
      layer_norm_linear_forward_meta(x, weight, bias, ln_weight, ln_bias, eps, activation);
  const Activation act = parse_activation("layer_norm_linear_forward", activation);
  const auto [normalised, row_mean, row_rstd] = layer_norm(x, ln_weight, ln_bias, eps);
  mean.copy_(row_mean.view(mean.sizes()));
  rstd.copy_(row_rstd.view(rstd.sizes()));
  if (y.numel() == 0) return {y, preact, mean, rstd};
  Tensor& z = saves_preact(act) ? preact : y;
  linear_into(z, normalised, weight, bias);
  activate_into(y, z, act);
  return {y, preact, mean, rstd};
}

Grads layer_norm_linear_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                                     const Tensor& mean, const Tensor& rstd,
                                     const OptionalTensor& preact, c10::string_view activation,
                                     std::array<bool, 5> output_mask) {
  auto [dx, dweight, dbias, dln_weight, dln_bias] = layer_norm_linear_backward_meta(
      dy, x, weight, ln_weight, ln_bias, mean, rstd, preact, activation, output_mask);
  const Tensor dz = as_matrix(
      activation_backward(dy, preact, parse_activation("layer_norm_linear_backward", activation)));

  Tensor normalised;  // (rows, K)
  if (output_mask[1]) {
    Tensor shifted = (x - mean.unsqueeze(-1)).mul_(rstd.unsqueeze(-1));
    if (is_given(ln_weight)) shifted.mul_(*ln_weight);
    if (is_given(ln_bias)) shifted.add_(*ln_bias);
    normalised = as_matrix(shifted.to(x.scalar_type()));
  }
  const bool wants_rows = output_mask[0] || output_mask[3] || output_mask[4];
  Tensor dnormalised = wants_rows ? at::empty(x.sizes(), x.options()) : Tensor();
  linear_backward_into(dnormalised, dweight, dbias, {wants_rows, output_mask[1], output_mask[2]},
                       dz, normalised, weight);
  if (wants_rows && x.numel() == 0) {
    dln_weight.zero_();
    dln_bias.zero_();
  } else if (wants_rows) {
    const bool wants_scale = dln_weight.numel() > 0, wants_shift = dln_bias.numel() > 0;
    // In the statistics' dtype: ATen sums half-precision parameter gradients in half precision.
    const auto dtype = acc_dtype(x);
    const auto [rows, scale, shift] = at::native_layer_norm_backward(
        dnormalised.to(dtype), x.to(dtype), {x.size(-1)}, mean.contiguous().unsqueeze(-1),
        rstd.contiguous().unsqueeze(-1), scale_parameter(x, ln_weight),
        statistics_parameter(ln_bias), {output_mask[0], wants_scale, wants_shift});
    if (output_mask[0]) dx.copy_(rows);
    if (wants_scale) dln_weight.copy_(scale);
    if (wants_shift) dln_bias.copy_(shift);
  }
  return {dx, dweight, dbias, dln_weight, dln_bias};
}

#ifdef TORCHWELD_CUDA
Tensor layer_norm_linear_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                              double eps, c10::string_view activation) {
  Tensor y = layer_norm_linear_meta(x, weight, bias, ln_weight, ln_bias, eps, activation);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  matmul_into(as_matrix(y), norm_rows({/*centred=*/true, ln_weight, ln_bias}, x, eps), weight,
              {bias, parse_activation("layer_norm_linear", activation)});
  return y;
}

Forward layer_norm_linear_forward_cuda(const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& bias, const OptionalTensor& ln_weight,
                                       const OptionalTensor& ln_bias, double eps,
                                       c10::string_view activation) {
  auto [y, preact, mean, rstd] =
      layer_norm_linear_forward_meta(x, weight, bias, ln_weight, ln_bias, eps, activation);
  const OnDevice on(x.device());
  const Tensor normalised = norm_rows({/*centred=*/true, ln_weight, ln_bias}, x, eps, {mean, rstd});
  if (y.numel() == 0) return {y, preact, mean, rstd};
  MatmulEpilogue epilogue = {bias, parse_activation("layer_norm_linear_forward", activation)};
  if (saves_preact(epilogue.activation)) epilogue.preact = preact;
  matmul_into(as_matrix(y), normalised, weight, epilogue);
  return {y, preact, mean, rstd};
}

Grads layer_norm_linear_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& ln_weight,
                                      const OptionalTensor& ln_bias, const Tensor& mean,
                                      const Tensor& rstd, const OptionalTensor& preact,
                                      c10::string_view activation,
                                      std::array<bool, 5> output_mask) {
  auto [dx, dweight, dbias, dln_weight, dln_bias] = layer_norm_linear_backward_meta(
      dy, x, weight, ln_weight, ln_bias, mean, rstd, preact, activation, output_mask);
  const OnDevice on(x.device());
  const Tensor dz = activation_backward_into(
      dbias, dy, preact, parse_activation("layer_norm_linear_backward", activation));
  norm_matmul_backward_into(dx, dweight, dln_weight, dln_bias, output_mask[0], output_mask[1],
                            {/*centred=*/true, ln_weight, ln_bias}, dz, x, weight, {mean, rstd});
  return {dx, dweight, dbias, dln_weight, dln_bias};
}
#endif

Tensor call_layer_norm_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                              double eps, c10::string_view activation) {
  static const auto op = find_op<decltype(call_layer_norm_linear)>("layer_norm_linear");
  return op.call(x, weight, bias, ln_weight, ln_bias, eps, activation);
}

Forward call_layer_norm_linear_forward(const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& bias, const OptionalTensor& ln_weight,
                                       const OptionalTensor& ln_bias, double eps,
                                       c10::string_view activation) {
  static const auto op =
      find_op<decltype(call_layer_norm_linear_forward)>("layer_norm_linear_forward");
  return op.call(x, weight, bias, ln_weight, ln_bias, eps, activation);
}

Grads call_layer_norm_linear_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& ln_weight,
                                      const OptionalTensor& ln_bias, const Tensor& mean,
                                      const Tensor& rstd, const OptionalTensor& preact,
                                      c10::string_view activation,
                                      std::array<bool, 5> output_mask) {
  static const auto op =
      find_op<decltype(call_layer_norm_linear_backward)>("layer_norm_linear_backward");
  return op.call(dy, x, weight, ln_weight, ln_bias, mean, rstd, preact, activation, output_mask);
}

struct LayerNormLinearFunction : torch::autograd::Function<LayerNormLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& ln_weight,
                               const OptionalTensor& ln_bias, double eps,
                               const std::string& activation) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, preact, mean, rstd] =
        call_layer_norm_linear_forward(x, weight, bias, ln_weight, ln_bias, eps, activation);
    const Activation act = parse_activation("layer_norm_linear", activation);
    const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
    ctx->save_for_backward(
        {x, weight, or_undefined(ln_weight), or_undefined(ln_bias), mean, rstd, saved});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["bias"] = is_given(bias) && bias->requires_grad();
    ctx->mark_non_differentiable({preact, mean, rstd});
    ctx->set_materialize_grads(false);
    return {y, preact, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(7);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &ln_weight = saved[2], &ln_bias = saved[3];
    const std::array<bool, 5> wanted = {x.requires_grad(), weight.requires_grad(),
                                        ctx->saved_data["bias"].toBool(),
                                        ln_weight.defined() && ln_weight.requires_grad(),
                                        ln_bias.defined() && ln_bias.requires_grad()};
    auto [dx, dweight, dbias, dln_weight, dln_bias] = call_layer_norm_linear_backward(
        grads[0], x, weight, optional(ln_weight), optional(ln_bias), saved[4], saved[5],
        optional(saved[6]), ctx->saved_data["activation"].toStringRef(), wanted);
    return {if_wanted(wanted[0], dx),
            if_wanted(wanted[1], dweight),
            if_wanted(wanted[2], dbias),
            if_wanted(wanted[3], dln_weight),
            if_wanted(wanted[4], dln_bias),
            Tensor(),
            Tensor()};
  }
};

Forward layer_norm_linear_forward_autograd(const Tensor& x, const Tensor& weight,
                                           const OptionalTensor& bias,
                                           const OptionalTensor& ln_weight,
                                           const OptionalTensor& ln_bias, double eps,
                                           c10::string_view activation) {
  if (any_needs_grad(x, weight, bias, ln_weight, ln_bias)) {
    const auto out = LayerNormLinearFunction::apply(x, weight, bias, ln_weight, ln_bias, eps,
                                                    std::string(activation));
    return {out[0], out[1], out[2], out[3]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_layer_norm_linear_forward(x, weight, bias, ln_weight, ln_bias, eps, activation);
}

Tensor layer_norm_linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                                  double eps, c10::string_view activation) {
  if (any_needs_grad(x, weight, bias, ln_weight, ln_bias)) {
    const char* op = "layer_norm_linear";  // refusals name this op, not layer_norm_linear_forward
    layer_norm_linear_checks(op, x, weight, bias, ln_weight, ln_bias);
    check_eps(op, eps);
    parse_activation(op, activation);
    return LayerNormLinearFunction::apply(x, weight, bias, ln_weight, ln_bias, eps,
                                          std::string(activation))[0];
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_layer_norm_linear(x, weight, bias, ln_weight, ln_bias, eps, activation);
}

template <at::DeviceType device>
Tensor layer_norm_linear_autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& ln_weight, const OptionalTensor& ln_bias,
                                  double eps, c10::string_view activation) {
  const Autocast<device> cast;
  return call_layer_norm_linear(cast(x), cast(weight), cast(bias), cast(ln_weight), cast(ln_bias),
                                eps, activation);
}

template <at::DeviceType device>
Forward layer_norm_linear_forward_autocast(const Tensor& x, const Tensor& weight,
                                           const OptionalTensor& bias,
                                           const OptionalTensor& ln_weight,
                                           const OptionalTensor& ln_bias, double eps,
                                           c10::string_view activation) {
  const Autocast<device> cast;
  return call_layer_norm_linear_forward(cast(x), cast(weight), cast(bias), cast(ln_weight),
                                        cast(ln_bias), eps, activation);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
      "Tensor? ln_bias=None, *, float eps=1e-5, str activation=\"none\") -> Tensor",
      tags);
  m.def(
      "layer_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5, "
      "str activation=\"none\") -> (Tensor y, Tensor preact, Tensor mean, Tensor rstd)",
      tags);
  m.def(
      "layer_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? ln_weight, "
      "Tensor? ln_bias, Tensor mean, Tensor rstd, Tensor? preact=None, *, "
      "str activation=\"none\", bool[5] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)",
      tags);
}

TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("layer_norm_linear", layer_norm_linear_meta);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_meta);
  m.impl("layer_norm_linear_backward", layer_norm_linear_backward_meta);
}

TORCH_LIBRARY_IMPL(torchweld, CPU, m) {
  m.impl("layer_norm_linear", layer_norm_linear_cpu);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_cpu);
  m.impl("layer_norm_linear_backward", layer_norm_linear_backward_cpu);
}

TORCH_LIBRARY_IMPL(torchweld, CUDA, m) {
#ifdef TORCHWELD_CUDA
  m.impl("layer_norm_linear", layer_norm_linear_cuda);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_cuda);
  m.impl("layer_norm_linear_backward", layer_norm_linear_backward_cuda);
#else
  m.impl("layer_norm_linear", no_cuda_kernel_function());
  m.impl("layer_norm_linear_forward", no_cuda_kernel_function());
  m.impl("layer_norm_linear_backward", no_cuda_kernel_function());
#endif
}

TORCH_LIBRARY_IMPL(torchweld, Autograd, m) {
  m.impl("layer_norm_linear", layer_norm_linear_autograd);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_autograd);
  m.impl("layer_norm_linear_backward", no_gradient_function());
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("layer_norm_linear", layer_norm_linear_autocast<at::kCPU>);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("layer_norm_linear", layer_norm_linear_autocast<at::kCUDA>);
  m.impl("layer_norm_linear_forward", layer_norm_linear_forward_autocast<at::kCUDA>);
}

}  // namespace
}  // namespace torchweld::layer_norm_linear_room
