// cross_entropy computes the cross entropy of z = softcap tanh(logits / softcap) / temperature.
//   logits (..., N), target t (...), loss () or (...)
//   loss of a row = (1 - eps) (lse - z_t) + eps (lse - mean(z)) + z_loss lse^2
//   eps is label_smoothing, and lse is logsumexp(z)
//
// For a scalar loss, training reads the logits once and writes their gradient once.
// cross_entropy_gradients_forward computes the loss and, for dloss = 1, the gradient of the logits.
// cross_entropy_gradients_backward multiplies this gradient by dloss. If only the graph holds the
// gradient, the multiplication is in place. The kernel reads dloss on the device, so the host
// doesn't wait. If dloss is 1, the kernel leaves the gradient as it is. Otherwise it reads and
// writes the gradient once more.
//
// These calls read the logits twice: calls with reduction "none", calls with float16, and calls
// under torch.compile, saved-tensor hooks or transforms, where the gradient can't be scaled in
// place. For these calls, cross_entropy_forward also returns max(z) and lse - max(z) of each row (0
// for an ignored row), and cross_entropy_backward computes the gradient from them. With float16, a
// gradient for dloss = 1 would underflow, because it does not contain the loss scale.
//
// NOTE: no kernel overwrites the logits with their gradient. The forward can't know whether the
// caller still reads the logits. The backward can't know either: while the graph holds a tensor,
// the Python object of the tensor stays alive, even if no Python variable refers to it any more.
// The stored gradient has no Python object. Therefore its reference count shows whether only the
// graph holds the gradient.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "core/dispatch.h"
#include "layers/donation.h"
#include "losses/scale.h"
#include "ops/cross_entropy/engine.h"

namespace torchweld::cross_entropy_op {
namespace {

// Checks logits and target. Returns the shape of a per-token result.
std::vector<c10::SymInt> check_inputs(const char* op, const Tensor& logits, const Tensor& target,
                                      const LossOptions& options) {
  check_floating(op, "logits", logits);
  check_min_dim(op, "logits", logits, 1, "(..., N)");
  return check_target(op, target, "logits", logits, "N", options.shift);
}

Tensor empty_dlogits(const Tensor& logits) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

Tensor cross_entropy_meta(const Tensor& logits, const Tensor& target, c10::string_view reduction,
                          int64_t ignore_index, double label_smoothing,
                          std::optional<double> softcap, double z_loss, int64_t shift,
                          double temperature) {
  const char* op = "cross_entropy";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  return empty_loss(logits, check_inputs(op, logits, target, options), options);
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward_meta(
    const Tensor& logits, const Tensor& target, c10::string_view reduction, int64_t ignore_index,
    double label_smoothing, std::optional<double> softcap, double z_loss, int64_t shift,
    double temperature) {
  const char* op = "cross_entropy_forward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_inputs(op, logits, target, options);
  return {empty_loss(logits, sizes, options), empty_per_token(logits, sizes),
          empty_per_token(logits, sizes)};
}

Tensor cross_entropy_backward_meta(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                                   const Tensor& max, const Tensor& log_sum,
                                   c10::string_view reduction, int64_t ignore_index,
                                   double label_smoothing, std::optional<double> softcap,
                                   double z_loss, int64_t shift, double temperature) {
  const char* op = "cross_entropy_backward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_inputs(op, logits, target, options);
  check_dloss(op, dloss, logits, sizes, options, "logits");
  check_per_token(op, "max", max, logits, sizes, "logits");
  check_per_token(op, "log_sum", log_sum, logits, sizes, "logits");
  return empty_dlogits(logits);
}

std::tuple<Tensor, Tensor> cross_entropy_gradients_forward_meta(
    const Tensor& logits, const Tensor& target, c10::string_view reduction, int64_t ignore_index,
    double label_smoothing, std::optional<double> softcap, double z_loss, int64_t shift,
    double temperature) {
  const char* op = "cross_entropy_gradients_forward";
  const LossOptions options = cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                    softcap, z_loss, shift, temperature);
  const auto sizes = check_inputs(op, logits, target, options);
  check_is_reduced(op, options);
  return {empty_loss(logits, sizes, options), empty_dlogits(logits)};
}

Tensor cross_entropy_gradients_backward_meta(const Tensor& dloss, const Tensor& unit_dlogits) {
  const char* op = "cross_entropy_gradients_backward";
  check_floating(op, "unit_dlogits", unit_dlogits);
  check_device(op, "dloss", dloss, "unit_dlogits", unit_dlogits);
  check_dtype(op, "dloss", dloss, acc_dtype(unit_dlogits));
  check_shape(op, "dloss", dloss, {}, "a scalar");
  return Donation::over(unit_dlogits);
}

Tensor zero_rows(const LogitInputs& in) {
  return at::zeros({in.targets.numel()}, in.logits.options().dtype(acc_dtype(in.logits)));
}

// The functions below implement the ops for a given engine.
template <Engine engine>
Tensor loss_on(const Tensor& logits, const Tensor& target, c10::string_view reduction,
               int64_t ignore_index, double label_smoothing, std::optional<double> softcap,
               double z_loss, int64_t shift, double temperature) {
  const char* op = "cross_entropy";
  Tensor loss = cross_entropy_meta(logits, target, reduction, ignore_index, label_smoothing,
                                   softcap, z_loss, shift, temperature);
  const LogitInputs in = {logits, target,
                          cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                softcap, z_loss, shift, temperature)};
  const LogitRows rows = {zero_rows(in), zero_rows(in), zero_rows(in)};
  engine(op, in, rows, {}, {});
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  return loss;
}

template <Engine engine>
std::tuple<Tensor, Tensor, Tensor> forward_on(const Tensor& logits, const Tensor& target,
                                              c10::string_view reduction, int64_t ignore_index,
                                              double label_smoothing, std::optional<double> softcap,
                                              double z_loss, int64_t shift, double temperature) {
  const char* op = "cross_entropy_forward";
  auto [loss, max, log_sum] =
      cross_entropy_forward_meta(logits, target, reduction, ignore_index, label_smoothing, softcap,
                                 z_loss, shift, temperature);
  const LogitInputs in = {logits, target,
                          cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                softcap, z_loss, shift, temperature)};
  const LogitRows rows = {zero_rows(in), zero_rows(in), zero_rows(in)};
  engine("cross_entropy", in, rows, {}, {});
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  copy_from_rows(max, rows.max, target, in.options);
  copy_from_rows(log_sum, rows.log_sum, target, in.options);
  return {loss, max, log_sum};
}

template <Engine engine>
Tensor backward_on(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                   const Tensor& max, const Tensor& log_sum, c10::string_view reduction,
                   int64_t ignore_index, double label_smoothing, std::optional<double> softcap,
                   double z_loss, int64_t shift, double temperature) {
  const char* op = "cross_entropy_backward";
  const Tensor dlogits =
      cross_entropy_backward_meta(dloss, logits, target, max, log_sum, reduction, ignore_index,
                                  label_smoothing, softcap, z_loss, shift, temperature);
  const LogitInputs in = {logits, target,
                          cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                softcap, z_loss, shift, temperature)};
  engine(op, in,
         {{}, rows_of_result(max, target, in.options), rows_of_result(log_sum, target, in.options)},
         dloss_of_rows(dloss, target, in.targets, in.options), dlogits);
  return dlogits;
}

template <Engine engine>
std::tuple<Tensor, Tensor> gradients_forward_on(const Tensor& logits, const Tensor& target,
                                                c10::string_view reduction, int64_t ignore_index,
                                                double label_smoothing,
                                                std::optional<double> softcap, double z_loss,
                                                int64_t shift, double temperature) {
  const char* op = "cross_entropy_gradients_forward";
  auto [loss, dlogits] =
      cross_entropy_gradients_forward_meta(logits, target, reduction, ignore_index, label_smoothing,
                                           softcap, z_loss, shift, temperature);
  const LogitInputs in = {logits, target,
                          cross_entropy_options(op, reduction, ignore_index, label_smoothing,
                                                softcap, z_loss, shift, temperature)};
  const LogitRows rows = {zero_rows(in), zero_rows(in), zero_rows(in)};
  const Tensor one = at::ones({}, rows.loss.options());
  engine("cross_entropy", in, rows, dloss_of_rows(one, target, in.targets, in.options), dlogits);
  reduce_loss(loss, rows.loss, target, in.targets, in.options);
  return {loss, dlogits};
}

template <ScaleInto scale_into>
Tensor gradients_backward_on(const Tensor& dloss, const Tensor& unit_dlogits) {
  Tensor dlogits = cross_entropy_gradients_backward_meta(dloss, unit_dlogits);
  scale_into(dlogits, unit_dlogits, dloss);
  return dlogits;
}

#define TW_CROSS_ENTROPY_KERNELS(device)                                                     \
  constexpr auto cross_entropy_##device = loss_on<cross_entropy_rows_##device>;              \
  constexpr auto cross_entropy_forward_##device = forward_on<cross_entropy_rows_##device>;   \
  constexpr auto cross_entropy_backward_##device = backward_on<cross_entropy_rows_##device>; \
  constexpr auto cross_entropy_gradients_forward_##device =                                  \
      gradients_forward_on<cross_entropy_rows_##device>;                                     \
  constexpr auto cross_entropy_gradients_backward_##device =                                 \
      gradients_backward_on<scale_into_##device>
TW_CROSS_ENTROPY_KERNELS(cpu);
#ifdef TORCHWELD_CUDA
TW_CROSS_ENTROPY_KERNELS(cuda);
#endif

TW_OP(cross_entropy);
TW_OP(cross_entropy_forward);
TW_OP(cross_entropy_backward);
TW_OP(cross_entropy_gradients_forward);
TW_OP(cross_entropy_gradients_backward);

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                               c10::string_view reduction, int64_t ignore_index,
                               double label_smoothing, std::optional<double> softcap, double z_loss,
                               int64_t shift, double temperature) {
    ctx->set_materialize_grads(false);
    Donation::prepare(ctx);
    auto& data = ctx->saved_data;
    const bool keeps_gradient =
        reduction != "none" && logits.scalar_type() != at::kHalf && Donation::is_possible(logits);
    data["keeps_gradient"] = keeps_gradient;
    if (keeps_gradient) {
      auto [loss, dlogits] = call_cross_entropy_gradients_forward.below(
          logits, target, reduction, ignore_index, label_smoothing, softcap, z_loss, shift,
          temperature);
      ctx->save_for_backward({dlogits});
      return {loss};
    }
    auto [loss, max, log_sum] =
        call_cross_entropy_forward.below(logits, target, reduction, ignore_index, label_smoothing,
                                         softcap, z_loss, shift, temperature);
    ctx->save_for_backward({logits, target, max, log_sum});
    data["reduction"] = reduction;
    data["ignore_index"] = ignore_index;
    data["label_smoothing"] = label_smoothing;
    data["softcap"] = softcap;
    data["z_loss"] = z_loss;
    data["shift"] = shift;
    data["temperature"] = temperature;
    return {loss};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(9);
    const Tensor& dloss = grads[0];
    if (!dloss.defined()) return all;
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    if (data["keeps_gradient"].toBool()) {
      const Donation unit_dlogits(ctx, saved[0], dloss);
      all[0] = call_cross_entropy_gradients_backward(dloss, saved[0]);
      return all;
    }
    all[0] = call_cross_entropy_backward(
        dloss, saved[0], saved[1], saved[2], saved[3], data["reduction"].toStringRef(),
        data["ignore_index"].toInt(), data["label_smoothing"].toDouble(),
        data["softcap"].toOptional<double>(), data["z_loss"].toDouble(), data["shift"].toInt(),
        data["temperature"].toDouble());
    return all;
  }
};

// Checks the arguments of a call that autograd records. With these checks, errors name
// cross_entropy instead of an internal op.
void cross_entropy_checks(const char* op, const Tensor& logits, const Tensor& target,
                          c10::string_view reduction, int64_t ignore_index, double label_smoothing,
                          std::optional<double> softcap, double z_loss, int64_t shift,
                          double temperature) {
  check_inputs(op, logits, target,
               cross_entropy_options(op, reduction, ignore_index, label_smoothing, softcap, z_loss,
                                     shift, temperature));
}

// NOTE: the op has no autocast kernel. torch's autocast would convert 16-bit logits to fp32, but
// the kernels compute in fp32 anyway.
TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "Tensor logits, Tensor target, ";
  const std::string options =
      "*, str reduction=\"mean\", int ignore_index=-100, float label_smoothing=0, "
      "float? softcap=None, float z_loss=0, int shift=0, float temperature=1.0";
  const std::string name = "cross_entropy";
  define_op(m, name + "(" + inputs + options + ") -> Tensor", TW_KERNELS(cross_entropy),
            recorded_by<CrossEntropyFunction>(call_cross_entropy, cross_entropy_checks));
  define_op(
      m, name + "_forward(" + inputs + options + ") -> (Tensor loss, Tensor max, Tensor log_sum)",
      TW_KERNELS(cross_entropy_forward), no_gradient_function());
  define_op(m,
            name + "_backward(Tensor dloss, " + inputs + "Tensor max, Tensor log_sum, " + options +
                ") -> Tensor dlogits",
            TW_KERNELS(cross_entropy_backward), no_gradient_function());
  define_op(m,
            name + "_gradients_forward(" + inputs + options + ") -> (Tensor loss, Tensor dlogits)",
            TW_KERNELS(cross_entropy_gradients_forward), no_gradient_function());
  define_op(m, name + "_gradients_backward(Tensor dloss, Tensor unit_dlogits) -> Tensor dlogits",
            TW_KERNELS(cross_entropy_gradients_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::cross_entropy_op
