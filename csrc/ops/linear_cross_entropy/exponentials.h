// The ops behind keep="exponentials". In addition to the loss, the forward returns y and factor
// (losses/exponentials.h). The backward computes the gradients from y and factor.
#pragma once

#include "core/dispatch.h"
#include "losses/exponentials.h"

namespace torchweld::linear_cross_entropy_op {

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_forward_meta(
    const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    c10::string_view reduction, int64_t ignore_index, std::optional<double> softcap, double z_loss,
    int64_t shift, double temperature) {
  const char* op = "linear_cross_entropy_exponentials_forward";
  const LossOptions options =
      cross_entropy_options(op, reduction, ignore_index, 0, softcap, z_loss, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  const Exponentials kept = empty_exponentials(x, weight);
  return {empty_loss(x, sizes, options), kept.y, kept.factor};
}

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_backward_meta(
    const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
    const Tensor& y, const Tensor& factor, c10::string_view reduction, int64_t ignore_index,
    int64_t shift, std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_exponentials_backward";
  const LossOptions options = {parse_reduction(op, reduction)};
  const auto sizes = check_loss_inputs(op, x, weight, target, std::nullopt, shift);
  check_dloss(op, dloss, x, sizes, options);
  check_like(op, "y", y, "x", x);
  check_shape(op, "y", y, exponentials_sizes(x, weight), "(..., N filled up to 64)");
  check_per_token(op, "factor", factor, x, without_last(x));
  const LossGradients grads = empty_loss_gradients(x, weight, output_mask);
  return {grads.dx, grads.dweight, grads.dbias};
}

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_forward_any(
    const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    c10::string_view reduction, int64_t ignore_index, std::optional<double> softcap, double z_loss,
    int64_t shift, double temperature) {
  const char* op = "linear_cross_entropy_exponentials_forward";
  auto [loss, y, factor] = linear_cross_entropy_exponentials_forward_meta(
      x, weight, target, bias, reduction, ignore_index, softcap, z_loss, shift, temperature);
  const LossInputs in = {
      LossKind::kCrossEntropy,
      x,
      weight,
      bias,
      target,
      {parse_reduction(op, reduction), ignore_index, 0, softcap, z_loss, shift, temperature}};
  const Exponentials kept = Exponentials{y, factor}.rows(in.targets.numel());
  const LossRows rows = {at::empty_like(kept.factor), at::empty_like(kept.factor), {}};
  exponentials_forward(in, rows, kept);
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  return {loss, y, factor};
}

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_backward_any(
    const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
    const Tensor& y, const Tensor& factor, c10::string_view reduction, int64_t ignore_index,
    int64_t shift, std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = linear_cross_entropy_exponentials_backward_meta(
      dloss, x, weight, target, y, factor, reduction, ignore_index, shift, output_mask);
  LossOptions options;
  options.reduction = parse_reduction("linear_cross_entropy_exponentials_backward", reduction);
  options.ignore_index = ignore_index;
  options.shift = shift;
  const Tensor targets = target_of_rows(target, options);
  const LossGradients grads = {dx, dweight, dbias, output_mask};
  if (grads.any()) {
    exponentials_backward(Exponentials{y, factor}.rows(targets.numel()),
                          dloss_of_rows(dloss, target, targets, options), x, weight, grads);
  }
  return {dx, dweight, dbias};
}

constexpr auto linear_cross_entropy_exponentials_forward_cpu =
    linear_cross_entropy_exponentials_forward_any;
constexpr auto linear_cross_entropy_exponentials_backward_cpu =
    linear_cross_entropy_exponentials_backward_any;
#ifdef TORCHWELD_CUDA
constexpr auto linear_cross_entropy_exponentials_forward_cuda =
    linear_cross_entropy_exponentials_forward_any;
constexpr auto linear_cross_entropy_exponentials_backward_cuda =
    linear_cross_entropy_exponentials_backward_any;
#endif

}  // namespace torchweld::linear_cross_entropy_op
