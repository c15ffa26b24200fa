// linear_cross_entropy computes the cross entropy of
//   z = softcap tanh(linear(x, weight, bias) / softcap) / temperature
//   x (..., K), weight (N, K), bias (N,), target t (...), loss () or (...)
//   loss of a row = (1 - eps) (lse - z_t) + eps (lse - mean(z)) + z_loss lse^2
//   eps is label_smoothing, and lse is logsumexp(z)
//
// keep="nothing": linear_cross_entropy_forward also returns lse of each row (0 if the row is
// ignored). linear_cross_entropy_backward computes the logits again and uses lse. Its arguments
// dlse and dmean are the gradients with respect to lse and mean(z). If the vocabulary is sharded, a
// shard needs dlse and dmean even for rows whose target is in another shard.
//
// keep="gradients": linear_cross_entropy_gradients_forward also computes the gradients for
// dloss = 1. linear_cross_entropy_gradients_backward multiplies these gradients by dloss.
//
// keep="exponentials": see exponentials.h.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "core/dispatch.h"
#include "layers/donation.h"
#include "losses/loss.h"
#include "losses/scale.h"
#include "ops/linear_cross_entropy/exponentials.h"
#include "ops/linear_cross_entropy/keep.h"

namespace torchweld::linear_cross_entropy_op {
namespace {

using Grads3 = std::tuple<Tensor, Tensor, Tensor>;
using LossAndGrads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> linear_cross_entropy_forward_meta(
    const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    std::optional<double> softcap, double z_loss, int64_t shift, double temperature) {
  const char* op = "linear_cross_entropy_forward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  return {empty_loss(x, sizes, options), empty_per_token(x, sizes)};
}

Tensor linear_cross_entropy_meta(const Tensor& x, const Tensor& weight, const Tensor& target,
                                 const OptionalTensor& bias, c10::string_view reduction,
                                 int64_t ignore_index, double label_smoothing,
                                 std::optional<double> softcap, double z_loss, int64_t shift,
                                 double temperature, c10::string_view keep) {
  const char* op = "linear_cross_entropy";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  parse_keep(op, keep, options, x, weight);
  return empty_loss(x, sizes, options);
}

Grads3 linear_cross_entropy_backward_meta(const Tensor& dloss, const Tensor& x,
                                          const Tensor& weight, const Tensor& target,
                                          const Tensor& lse, const OptionalTensor& bias,
                                          c10::string_view reduction, int64_t ignore_index,
                                          double label_smoothing, std::optional<double> softcap,
                                          double z_loss, int64_t shift, double temperature,
                                          const OptionalTensor& dlse, const OptionalTensor& dmean,
                                          std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_backward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  check_dloss(op, dloss, x, sizes, options);
  check_per_token(op, "lse", lse, x, sizes);
  if (is_given(dlse)) check_per_token(op, "dlse", *dlse, x, sizes);
  if (is_given(dmean)) check_per_token(op, "dmean", *dmean, x, sizes);
  const LossGradients grads = empty_loss_gradients(x, weight, output_mask);
  return {grads.dx, grads.dweight, grads.dbias};
}

LossAndGrads linear_cross_entropy_gradients_forward_meta(
    const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    std::optional<double> softcap, double z_loss, int64_t shift, double temperature,
    std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_gradients_forward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias, shift);
  check_is_reduced(op, options);
  const LossGradients grads = empty_loss_gradients(x, weight, output_mask);
  return {empty_loss(x, sizes, options), grads.dx, grads.dweight, grads.dbias};
}

Grads3 linear_cross_entropy_gradients_backward_meta(const Tensor& dloss, const Tensor& unit_dx,
                                                    const Tensor& unit_dweight,
                                                    const Tensor& unit_dbias) {
  const char* op = "linear_cross_entropy_gradients_backward";
  check_floating(op, "unit_dx", unit_dx);
  check_device(op, "dloss", dloss, "unit_dx", unit_dx);
  check_dtype(op, "dloss", dloss, acc_dtype(unit_dx));
  check_shape(op, "dloss", dloss, {}, "a scalar");
  check_like(op, "unit_dweight", unit_dweight, "unit_dx", unit_dx);
  check_like(op, "unit_dbias", unit_dbias, "unit_dx", unit_dx);
  return {at::empty_like(unit_dx), Donation::over(unit_dweight), at::empty_like(unit_dbias)};
}

LossInputs inputs_of(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& target, const LossOptions& options) {
  return {LossKind::kCrossEntropy, x, weight, bias, target, options};
}

Tensor zero_rows(const LossInputs& in) {
  return at::zeros({in.targets.numel()}, in.x.options().dtype(acc_dtype(in.x)));
}

// The functions below implement the ops for a given engine.
template <LossEngine engine>
Tensor loss_on(const Tensor& x, const Tensor& weight, const Tensor& target,
               const OptionalTensor& bias, c10::string_view reduction, int64_t ignore_index,
               double label_smoothing, std::optional<double> softcap, double z_loss, int64_t shift,
               double temperature, c10::string_view keep) {
  const char* op = "linear_cross_entropy";
  Tensor loss =
      linear_cross_entropy_meta(x, weight, target, bias, reduction, ignore_index, label_smoothing,
                                softcap, z_loss, shift, temperature, keep);
  const LossInputs in =
      inputs_of(x, weight, bias, target,
                cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap, z_loss,
                                      shift, temperature));
  const LossRows rows = {zero_rows(in), zero_rows(in), {}};
  engine("linear_cross_entropy", in, rows, {}, no_loss_gradients());
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  return loss;
}

template <LossEngine engine>
std::tuple<Tensor, Tensor> forward_on(const Tensor& x, const Tensor& weight, const Tensor& target,
                                      const OptionalTensor& bias, c10::string_view reduction,
                                      int64_t ignore_index, double label_smoothing,
                                      std::optional<double> softcap, double z_loss, int64_t shift,
                                      double temperature) {
  const char* op = "linear_cross_entropy_forward";
  auto [loss, lse] =
      linear_cross_entropy_forward_meta(x, weight, target, bias, reduction, ignore_index,
                                        label_smoothing, softcap, z_loss, shift, temperature);
  const LossInputs in =
      inputs_of(x, weight, bias, target,
                cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap, z_loss,
                                      shift, temperature));
  const LossRows rows = {zero_rows(in), zero_rows(in), {}};
  engine("linear_cross_entropy", in, rows, {}, no_loss_gradients());
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  copy_from_rows(lse, rows.lse, target, in.options);
  return {loss, lse};
}

template <LossEngine engine>
Grads3 backward_on(const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
                   const Tensor& lse, const OptionalTensor& bias, c10::string_view reduction,
                   int64_t ignore_index, double label_smoothing, std::optional<double> softcap,
                   double z_loss, int64_t shift, double temperature, const OptionalTensor& dlse,
                   const OptionalTensor& dmean, std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_backward";
  auto [dx, dweight, dbias] = linear_cross_entropy_backward_meta(
      dloss, x, weight, target, lse, bias, reduction, ignore_index, label_smoothing, softcap,
      z_loss, shift, temperature, dlse, dmean, output_mask);
  LossInputs in = inputs_of(x, weight, bias, target,
                            cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                  softcap, z_loss, shift, temperature));
  in.options.mean = is_given(dmean);
  const LossGradients grads = {dx, dweight, dbias, output_mask};
  if (grads.any()) {
    const auto optional_rows = [&](const OptionalTensor& t) {
      return is_given(t) ? rows_of_result(*t, target, in.options) : Tensor();
    };
    engine("linear_cross_entropy", in, {{}, rows_of_result(lse, target, in.options), {}},
           {dloss_of_rows(dloss, target, in.targets, in.options),
            {},
            optional_rows(dlse),
            optional_rows(dmean)},
           grads);
  }
  return {dx, dweight, dbias};
}

template <LossEngine engine>
LossAndGrads gradients_forward_on(const Tensor& x, const Tensor& weight, const Tensor& target,
                                  const OptionalTensor& bias, c10::string_view reduction,
                                  int64_t ignore_index, double label_smoothing,
                                  std::optional<double> softcap, double z_loss, int64_t shift,
                                  double temperature, std::array<bool, 3> output_mask) {
  const char* op = "linear_cross_entropy_gradients_forward";
  auto [loss, dx, dweight, dbias] = linear_cross_entropy_gradients_forward_meta(
      x, weight, target, bias, reduction, ignore_index, label_smoothing, softcap, z_loss, shift,
      temperature, output_mask);
  const LossInputs in =
      inputs_of(x, weight, bias, target,
                cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap, z_loss,
                                      shift, temperature));
  const LossRows rows = {zero_rows(in), zero_rows(in), {}};
  const Tensor one = at::ones({}, rows.loss.options());
  engine("linear_cross_entropy", in, rows, {dloss_of_rows(one, target, in.targets, in.options), {}},
         {dx, dweight, dbias, output_mask});
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  return {loss, dx, dweight, dbias};
}

template <ScaleInto scale_into>
Grads3 gradients_backward_on(const Tensor& dloss, const Tensor& unit_dx, const Tensor& unit_dweight,
                             const Tensor& unit_dbias) {
  auto [dx, dweight, dbias] =
      linear_cross_entropy_gradients_backward_meta(dloss, unit_dx, unit_dweight, unit_dbias);
  scale_into(dx, unit_dx, dloss);
  scale_into(dweight, unit_dweight, dloss);
  scale_into(dbias, unit_dbias, dloss);
  return {dx, dweight, dbias};
}

#define TW_LOSS_KERNELS(device)                                                            \
  constexpr auto linear_cross_entropy_##device = loss_on<loss_rows_##device>;              \
  constexpr auto linear_cross_entropy_forward_##device = forward_on<loss_rows_##device>;   \
  constexpr auto linear_cross_entropy_backward_##device = backward_on<loss_rows_##device>; \
  constexpr auto linear_cross_entropy_gradients_forward_##device =                         \
      gradients_forward_on<loss_rows_##device>;                                            \
  constexpr auto linear_cross_entropy_gradients_backward_##device =                        \
      gradients_backward_on<scale_into_##device>
TW_LOSS_KERNELS(cpu);
#ifdef TORCHWELD_CUDA
TW_LOSS_KERNELS(cuda);
#endif

TW_OP(linear_cross_entropy);
TW_OP(linear_cross_entropy_forward);
TW_OP(linear_cross_entropy_backward);
TW_OP(linear_cross_entropy_gradients_forward);
TW_OP(linear_cross_entropy_gradients_backward);
TW_OP(linear_cross_entropy_exponentials_forward);
TW_OP(linear_cross_entropy_exponentials_backward);

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const Tensor& target, const OptionalTensor& bias,
                               c10::string_view reduction, int64_t ignore_index,
                               double label_smoothing, std::optional<double> softcap, double z_loss,
                               int64_t shift, double temperature, c10::string_view keep) {
    ctx->set_materialize_grads(false);
    Donation::prepare(ctx);
    auto& data = ctx->saved_data;
    data["bias"] = is_given(bias);
    const char* op = "linear_cross_entropy";
    const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                      softcap, z_loss, shift, temperature);
    const Keep kept = parse_keep(op, keep, options, x, weight);
    data["kept"] = static_cast<int64_t>(kept);
    data["reduction"] = reduction;
    data["ignore_index"] = ignore_index;
    data["shift"] = shift;
    data["label_smoothing"] = label_smoothing;
    data["temperature"] = temperature;
    if (kept == Keep::kExponentials) {
      auto [loss, lse, y, factor, mean] = call_linear_cross_entropy_exponentials_forward.below(
          x, weight, target, bias, reduction, ignore_index, label_smoothing, softcap, z_loss, shift,
          temperature, "exponentials", false);
      ctx->save_for_backward({x, weight, target, y, factor});
      return {loss};
    }
    if (kept == Keep::kGradients) {
      const std::array<bool, 3> wanted = {needs_grad(x), needs_grad(weight), needs_grad(bias)};
      auto [loss, dx, dweight, dbias] = call_linear_cross_entropy_gradients_forward.below(
          x, weight, target, bias, reduction, ignore_index, label_smoothing, softcap, z_loss, shift,
          temperature, wanted);
      ctx->save_for_backward({dx, dweight, dbias});
      return {loss};
    }
    auto [loss, lse] = call_linear_cross_entropy_forward.below(x, weight, target, bias, reduction,
                                                               ignore_index, label_smoothing,
                                                               softcap, z_loss, shift, temperature);
    ctx->save_for_backward({x, weight, target, lse, or_undefined(bias)});
    data["softcap"] = softcap;
    data["z_loss"] = z_loss;
    return {loss};
  }

  template <typename Data>
  static Grads3 gradients(Keep kept, Data& data, const Tensor& dloss, const variable_list& saved,
                          const std::array<bool, 3>& wanted) {
    if (kept == Keep::kGradients) {
      const auto unit = [&](size_t i) { return wanted[i] ? saved[i] : saved[i].new_empty({0}); };
      return call_linear_cross_entropy_gradients_backward(dloss, unit(0), unit(1), unit(2));
    }
    const auto reduction = data["reduction"].toStringRef();
    const int64_t ignore_index = data["ignore_index"].toInt(), shift = data["shift"].toInt();
    const double label_smoothing = data["label_smoothing"].toDouble(),
                 temperature = data["temperature"].toDouble();
    if (kept == Keep::kExponentials) {
      return call_linear_cross_entropy_exponentials_backward(
          dloss, saved[0], saved[1], saved[2], saved[3], saved[4], reduction, ignore_index,
          label_smoothing, shift, temperature, wanted);
    }
    return call_linear_cross_entropy_backward(
        dloss, saved[0], saved[1], saved[2], saved[3], optional(saved[4]), reduction, ignore_index,
        label_smoothing, data["softcap"].template toOptional<double>(), data["z_loss"].toDouble(),
        shift, temperature, std::nullopt, std::nullopt, wanted);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(12);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    AskedGradients asked(ctx);
    const bool wants_x = asked.next(), wants_weight = asked.next();
    asked.next();  // target
    const std::array<bool, 3> wanted = {wants_x, wants_weight, asked.next(data["bias"].toBool())};
    const Keep kept = static_cast<Keep>(data["kept"].toInt());
    // dweight is the largest of the stored gradients, so its memory is donated.
    std::optional<Donation> unit_dweight;
    if (kept == Keep::kGradients) unit_dweight.emplace(ctx, saved[1], grads[0]);
    const Grads3 found = gradients(kept, data, grads[0], saved, wanted);
    all[0] = if_wanted(wanted[0], std::get<0>(found));
    all[1] = if_wanted(wanted[1], std::get<1>(found));
    all[3] = if_wanted(wanted[2], std::get<2>(found));
    return all;
  }
};

// Checks the arguments before linear_cross_entropy_forward checks them, so that errors name
// linear_cross_entropy.
void linear_cross_entropy_checks(const char* op, const Tensor& x, const Tensor& weight,
                                 const Tensor& target, const OptionalTensor& bias,
                                 c10::string_view reduction, int64_t ignore_index,
                                 double label_smoothing, std::optional<double> softcap,
                                 double z_loss, int64_t shift, double temperature,
                                 c10::string_view keep) {
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  check_loss_inputs(op, x, weight, target, bias, shift);
  parse_keep(op, keep, options, x, weight);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "Tensor x, Tensor weight, Tensor target, ";
  const std::string options =
      "Tensor? bias=None, *, str reduction=\"mean\", int ignore_index=-100, "
      "float label_smoothing=0, float? softcap=None, float z_loss=0, int shift=0, "
      "float temperature=1.0";
  const std::string name = "linear_cross_entropy";
  define_op(
      m, name + "(" + inputs + options + ", str keep=\"auto\") -> Tensor",
      TW_KERNELS(linear_cross_entropy),
      recorded_by<CrossEntropyFunction>(call_linear_cross_entropy, linear_cross_entropy_checks));
  define_op(m, name + "_forward(" + inputs + options + ") -> (Tensor loss, Tensor lse)",
            TW_KERNELS(linear_cross_entropy_forward), no_gradient_function());
  define_op(m,
            name + "_backward(Tensor dloss, " + inputs + "Tensor lse, " + options +
                ", Tensor? dlse=None, Tensor? dmean=None, bool[3] output_mask) -> "
                "(Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_cross_entropy_backward), no_gradient_function());
  define_op(m,
            name + "_gradients_forward(" + inputs + options +
                ", bool[3] output_mask) -> "
                "(Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_cross_entropy_gradients_forward), no_gradient_function());
  define_op(m,
            name +
                "_gradients_backward(Tensor dloss, Tensor unit_dx, Tensor unit_dweight, "
                "Tensor unit_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_cross_entropy_gradients_backward), no_gradient_function());
  define_op(m,
            name + "_exponentials_forward(" + inputs + options +
                ", str keep=\"exponentials\", bool mean=False) -> "
                "(Tensor loss, Tensor lse, Tensor y, Tensor factor, Tensor mean)",
            TW_KERNELS(linear_cross_entropy_exponentials_forward), no_gradient_function());
  define_op(m,
            name + "_exponentials_backward(Tensor dloss, " + inputs +
                "Tensor y, Tensor factor, *, str reduction=\"mean\", int ignore_index=-100, "
                "float label_smoothing=0, int shift=0, float temperature=1.0, "
                "bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_cross_entropy_exponentials_backward), no_gradient_function());
  define_autocast(m, call_linear_cross_entropy);
}

}  // namespace
}  // namespace torchweld::linear_cross_entropy_op
