// linear_token_logprobs computes each token's log-probability and, on request, its entropy:
//   logprob = z_t - lse(z),   entropy = lse(z) - sum(softmax(z) z)
//   z = softcap tanh(linear(x, weight, bias) / softcap) / temperature
//   x (..., K), weight (N, K), bias (N,), target t (...), logprob and entropy (...)
//
// linear_token_logprobs_forward also returns lse. linear_token_logprobs_backward computes the
// logits again and uses lse. If the caller does not request the entropy, `entropy` is a tensor of
// size (0,).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "core/dispatch.h"
#include "losses/loss.h"

namespace torchweld::linear_token_logprobs_op {
namespace {

using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

LossOptions options_of(const char* op, double temperature, std::optional<double> softcap) {
  LossOptions options;
  options.temperature = temperature;
  options.softcap = softcap;
  check_loss_options(op, options);
  return options;
}

Triple empty_logprobs(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target,
                      const OptionalTensor& bias, double temperature, std::optional<double> softcap,
                      bool entropy) {
  options_of(op, temperature, softcap);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias);
  const Tensor none = at::empty({0}, x.options().dtype(acc_dtype(x)));
  return {empty_per_token(x, sizes), entropy ? empty_per_token(x, sizes) : none,
          empty_per_token(x, sizes)};
}

Pair linear_token_logprobs_meta(const Tensor& x, const Tensor& weight, const Tensor& target,
                                const OptionalTensor& bias, double temperature,
                                std::optional<double> softcap, bool entropy) {
  auto [logprob, row_entropy, lse] = empty_logprobs("linear_token_logprobs", x, weight, target,
                                                    bias, temperature, softcap, entropy);
  return {logprob, row_entropy};
}

Triple linear_token_logprobs_forward_meta(const Tensor& x, const Tensor& weight,
                                          const Tensor& target, const OptionalTensor& bias,
                                          double temperature, std::optional<double> softcap,
                                          bool entropy) {
  return empty_logprobs("linear_token_logprobs_forward", x, weight, target, bias, temperature,
                        softcap, entropy);
}

Triple linear_token_logprobs_backward_meta(const Tensor& dlogprob, const Tensor& x,
                                           const Tensor& weight, const Tensor& target,
                                           const Tensor& lse, const OptionalTensor& bias,
                                           const OptionalTensor& row_entropy,
                                           const OptionalTensor& dentropy, double temperature,
                                           std::optional<double> softcap,
                                           std::array<bool, 3> output_mask) {
  const char* op = "linear_token_logprobs_backward";
  options_of(op, temperature, softcap);
  const auto sizes = check_loss_inputs(op, x, weight, target, bias);
  check_per_token(op, "dlogprob", dlogprob, x, sizes);
  check_per_token(op, "lse", lse, x, sizes);
  if (is_given(dentropy)) {
    check_per_token(op, "dentropy", *dentropy, x, sizes);
    TW_CHECK(is_given(row_entropy), op,
             "row_entropy must be given with dentropy, but got None; use the forward op's");
    check_per_token(op, "row_entropy", *row_entropy, x, sizes);
  }
  const LossGradients grads = empty_loss_gradients(x, weight, output_mask);
  return {grads.dx, grads.dweight, grads.dbias};
}

template <LossEngine engine>
Triple logprobs_of(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target,
                   const OptionalTensor& bias, double temperature, std::optional<double> softcap,
                   bool entropy) {
  const Triple results = empty_logprobs(op, x, weight, target, bias, temperature, softcap, entropy);
  const auto& [logprob, row_entropy, lse] = results;
  const LossInputs in = {
      LossKind::kLogprob, x, weight, bias, target, options_of(op, temperature, softcap)};
  engine("linear_token_logprobs", in,
         {logprob.view({-1}), lse.view({-1}), entropy ? row_entropy.view({-1}) : Tensor()}, {},
         no_loss_gradients());
  return results;
}

// The functions below implement the ops for a given engine.
template <LossEngine engine>
Pair logprobs_on(const Tensor& x, const Tensor& weight, const Tensor& target,
                 const OptionalTensor& bias, double temperature, std::optional<double> softcap,
                 bool entropy) {
  auto [logprob, row_entropy, lse] = logprobs_of<engine>("linear_token_logprobs", x, weight, target,
                                                         bias, temperature, softcap, entropy);
  return {logprob, row_entropy};
}

template <LossEngine engine>
Triple forward_on(const Tensor& x, const Tensor& weight, const Tensor& target,
                  const OptionalTensor& bias, double temperature, std::optional<double> softcap,
                  bool entropy) {
  return logprobs_of<engine>("linear_token_logprobs_forward", x, weight, target, bias, temperature,
                             softcap, entropy);
}

template <LossEngine engine>
Triple backward_on(const Tensor& dlogprob, const Tensor& x, const Tensor& weight,
                   const Tensor& target, const Tensor& lse, const OptionalTensor& bias,
                   const OptionalTensor& row_entropy, const OptionalTensor& dentropy,
                   double temperature, std::optional<double> softcap,
                   std::array<bool, 3> output_mask) {
  const char* op = "linear_token_logprobs_backward";
  auto [dx, dweight, dbias] =
      linear_token_logprobs_backward_meta(dlogprob, x, weight, target, lse, bias, row_entropy,
                                          dentropy, temperature, softcap, output_mask);
  const LossGradients grads = {dx, dweight, dbias, output_mask};
  if (!grads.any()) return {dx, dweight, dbias};
  const LossInputs in = {
      LossKind::kLogprob, x, weight, bias, target, options_of(op, temperature, softcap)};
  const auto flat = [](const Tensor& t) { return t.contiguous().view({-1}); };
  const bool has_entropy = is_given(dentropy);
  engine("linear_token_logprobs", in, {{}, flat(lse), has_entropy ? flat(*row_entropy) : Tensor()},
         {flat(dlogprob), has_entropy ? flat(*dentropy) : Tensor()}, grads);
  return {dx, dweight, dbias};
}

#define TW_LOGPROB_KERNELS(device)                                                        \
  constexpr auto linear_token_logprobs_##device = logprobs_on<loss_rows_##device>;        \
  constexpr auto linear_token_logprobs_forward_##device = forward_on<loss_rows_##device>; \
  constexpr auto linear_token_logprobs_backward_##device = backward_on<loss_rows_##device>
TW_LOGPROB_KERNELS(cpu);
#ifdef TORCHWELD_CUDA
TW_LOGPROB_KERNELS(cuda);
#endif

TW_OP(linear_token_logprobs);
TW_OP(linear_token_logprobs_forward);
TW_OP(linear_token_logprobs_backward);

struct LogprobsFunction : torch::autograd::Function<LogprobsFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const Tensor& target, const OptionalTensor& bias, double temperature,
                               std::optional<double> softcap, bool entropy) {
    auto [logprob, row_entropy, lse] = call_linear_token_logprobs_forward.below(
        x, weight, target, bias, temperature, softcap, entropy);
    ctx->save_for_backward(
        {x, weight, target, lse, or_undefined(bias), entropy ? row_entropy : Tensor()});
    ctx->set_materialize_grads(false);
    if (!entropy) ctx->mark_non_differentiable({row_entropy});
    ctx->saved_data["temperature"] = temperature;
    ctx->saved_data["softcap"] = softcap;
    return {logprob, row_entropy};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(7);
    if (!grads[0].defined() && !grads[1].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &lse = saved[3];
    AskedGradients asked(ctx);
    const bool wants_x = asked.next(), wants_weight = asked.next();
    asked.next();  // target
    const std::array<bool, 3> wanted = {wants_x, wants_weight, asked.next(saved[4].defined())};
    const Tensor dlogprob = grads[0].defined() ? grads[0] : at::zeros_like(lse);
    auto [dx, dweight, dbias] = call_linear_token_logprobs_backward(
        dlogprob, x, weight, saved[2], lse, optional(saved[4]), optional(saved[5]),
        optional(grads[1]), ctx->saved_data["temperature"].toDouble(),
        ctx->saved_data["softcap"].toOptional<double>(), wanted);
    all[0] = if_wanted(wanted[0], dx);
    all[1] = if_wanted(wanted[1], dweight);
    all[3] = if_wanted(wanted[2], dbias);
    return all;
  }
};

// Checks the arguments before linear_token_logprobs_forward checks them, so that errors name
// linear_token_logprobs.
void linear_token_logprobs_checks(const char* op, const Tensor& x, const Tensor& weight,
                                  const Tensor& target, const OptionalTensor& bias,
                                  double temperature, std::optional<double> softcap, bool) {
  options_of(op, temperature, softcap);
  check_loss_inputs(op, x, weight, target, bias);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "Tensor x, Tensor weight, Tensor target, ";
  const std::string options = "float temperature=1.0, float? softcap=None, ";
  const std::string name = "linear_token_logprobs";
  define_op(
      m,
      name + "(" + inputs + "Tensor? bias=None, *, " + options +
          "bool entropy=False) -> (Tensor logprob, Tensor entropy)",
      TW_KERNELS(linear_token_logprobs),
      recorded_by<LogprobsFunction>(call_linear_token_logprobs, linear_token_logprobs_checks));
  define_op(m,
            name + "_forward(" + inputs + "Tensor? bias=None, *, " + options +
                "bool entropy=False) -> (Tensor logprob, Tensor row_entropy, Tensor lse)",
            TW_KERNELS(linear_token_logprobs_forward), no_gradient_function());
  define_op(m,
            name + "_backward(Tensor dlogprob, " + inputs +
                "Tensor lse, Tensor? bias=None, Tensor? row_entropy=None, "
                "Tensor? dentropy=None, *, " +
                options + "bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
            TW_KERNELS(linear_token_logprobs_backward), no_gradient_function());
  define_autocast(m, call_linear_token_logprobs);
}

}  // namespace
}  // namespace torchweld::linear_token_logprobs_op
