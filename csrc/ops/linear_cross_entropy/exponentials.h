// The ops that linear_cross_entropy calls with keep="exponentials" or keep="auto". In addition to
// loss and lse, the forward returns y and factor (losses/exponentials.h). The backward computes the
// gradients from y and factor. With mean=True, the forward also returns mean(z) of each row. A loss
// with a sharded vocabulary needs mean(z) for label smoothing.
#pragma once

#include <ATen/ops/zeros.h>

#include "core/dispatch.h"
#include "losses/exponentials.h"
#include "ops/linear_cross_entropy/keep.h"

namespace torchweld::linear_cross_entropy_op {

// Returns true if the forward stores y and factor. With keep="auto", the forward stores them only
// if the Hopper kernels support the loss. If the forward does not store y and factor, both are
// tensors of size (0,).
inline bool stores_exponentials(const char* op, c10::string_view keep, const LossOptions& options,
                                const Tensor& x, const Tensor& weight) {
  TW_CHECK(keep == "exponentials" || keep == "auto" || keep == "nothing", op,
           "keep must be 'exponentials', 'auto' or 'nothing', but got '", std::string(keep), "'");
  return parse_keep(op, keep, options, x, weight) == Keep::kExponentials;
}

using LossAndExponentials = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline LossAndExponentials linear_cross_entropy_exponentials_forward_meta(
    const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    std::optional<double> softcap, double z_loss, int64_t shift, double temperature,
    c10::string_view keep, bool mean) {
  const char* op = "linear_cross_entropy_exponentials_forward";
  LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap,
                                              z_loss, shift, temperature);
  options.mean = mean;
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  const bool stores = stores_exponentials(op, keep, options, x, weight);
  const Exponentials kept =
      stores ? empty_exponentials(x, weight)
             : Exponentials{at::empty({0}, x.options()), empty_per_token(x, {c10::SymInt(0)})};
  const std::vector<c10::SymInt> none = {c10::SymInt(0)};
  return {empty_loss(x, sizes, options), empty_per_token(x, sizes), kept.y, kept.factor,
          empty_per_token(x, mean ? sizes : none)};
}

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_backward_meta(
    const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
    const Tensor& y, const Tensor& factor, c10::string_view reduction, int64_t ignore_index,
    double label_smoothing, int64_t shift, double temperature, std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_exponentials_backward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    std::nullopt, 0, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, std::nullopt, shift);
  check_dloss(op, dloss, x, sizes, options);
  check_like(op, "y", y, "x", x);
  check_shape(op, "y", y, exponentials_sizes(x, weight), "(..., N filled up to 64)");
  check_per_token(op, "factor", factor, x, without_last(x));
  const LossGradients grads = empty_loss_gradients(x, weight, output_mask);
  return {grads.dx, grads.dweight, grads.dbias};
}

// Computes the forward. If y and factor are not stored, `engine` computes the loss.
template <LossEngine engine>
LossAndExponentials exponentials_forward_on(const Tensor& x, const Tensor& weight,
                                            const Tensor& target, const OptionalTensor& bias,
                                            c10::string_view reduction, int64_t ignore_index,
                                            double label_smoothing, std::optional<double> softcap,
                                            double z_loss, int64_t shift, double temperature,
                                            c10::string_view keep, bool with_mean) {
  const char* op = "linear_cross_entropy_exponentials_forward";
  auto [loss, lse, y, factor, mean] = linear_cross_entropy_exponentials_forward_meta(
      x, weight, target, bias, reduction, ignore_index, label_smoothing, softcap, z_loss, shift,
      temperature, keep, with_mean);
  LossInputs in = {LossKind::kCrossEntropy,
                   x,
                   weight,
                   bias,
                   target,
                   cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap,
                                         z_loss, shift, temperature)};
  in.options.mean = with_mean;
  const auto zeros = [&] { return at::zeros({in.targets.numel()}, loss.options()); };
  const LossRows rows = {zeros(), zeros(), {}, with_mean ? zeros() : Tensor()};
  if (stores_exponentials(op, keep, in.options, x, weight)) {
    exponentials_forward(in, rows, Exponentials{y, factor}.rows(in.targets.numel()));
  } else {
    engine("linear_cross_entropy", in, rows, {}, no_loss_gradients());
  }
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  copy_from_rows(lse, rows.lse, target, in.options);
  if (with_mean) copy_from_rows(mean, rows.mean, target, in.options);
  return {loss, lse, y, factor, mean};
}

inline std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_exponentials_backward_any(
    const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
    const Tensor& y, const Tensor& factor, c10::string_view reduction, int64_t ignore_index,
    double label_smoothing, int64_t shift, double temperature, std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = linear_cross_entropy_exponentials_backward_meta(
      dloss, x, weight, target, y, factor, reduction, ignore_index, label_smoothing, shift,
      temperature, output_mask);
  const LossOptions options =
      cross_entropy_options("linear_cross_entropy_exponentials_backward", reduction, ignore_index,
                            label_smoothing, std::nullopt, 0, shift, temperature);
  const Tensor targets = target_of_rows(target, options);
  const LossGradients grads = {dx, dweight, dbias, output_mask};
  if (grads.any()) {
    exponentials_backward(Exponentials{y, factor}.rows(targets.numel()),
                          dloss_of_rows(dloss, target, targets, options), x, weight,
                          uniform_gradient(options, weight.size(0)), grads);
  }
  return {dx, dweight, dbias};
}

constexpr auto linear_cross_entropy_exponentials_forward_cpu =
    exponentials_forward_on<loss_rows_cpu>;
constexpr auto linear_cross_entropy_exponentials_backward_cpu =
    linear_cross_entropy_exponentials_backward_any;
#ifdef TORCHWELD_CUDA
constexpr auto linear_cross_entropy_exponentials_forward_cuda =
    exponentials_forward_on<loss_rows_cuda>;
constexpr auto linear_cross_entropy_exponentials_backward_cuda =
    linear_cross_entropy_exponentials_backward_any;
#endif

}  // namespace torchweld::linear_cross_entropy_op
