// Defines an op and its gradient. The op normalises the rows of x and multiplies the normalised
// rows by a weight:
//   y = activation(norm(x) @ weight.T + bias)
//   x (..., K), weight (N, K), bias (N,), y (..., N)
//
// <op>_forward also returns the pre-activation and the statistics of the rows, for the gradient.
// For the activations none and relu, the gradient does not need the pre-activation, so a tensor of
// size (0,) stands for it. The statistics have shape (...) and are fp32, or fp64 for fp64 inputs.
// The normalised rows are not kept in memory. The backward computes them again from the statistics.
// An RMS op also has weight_offset, which is added to the scale.
#pragma once

#include "core/dispatch.h"
#include "layers/linear_cpu.h"
#include "layers/norms.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld {

template <typename T, size_t>
using Repeat = T;

// `Norm` must have
//   kOp, kForward, kBackward  the names of the ops
//   kVectors, kStatistics     the names of the norm's vectors and statistics in the arguments
//   normalise                 CPU: computes the normalised rows, in x's dtype, and the statistics
//   normalise_again           CPU: computes the normalised rows from saved statistics
//   backward                  CPU: computes the gradients from the gradient of the normalised rows
//   kHasOffset                whether the op has weight_offset; the index pack o then has one index
template <typename Norm, typename = std::make_index_sequence<Norm::kVectors.size()>,
          typename = std::make_index_sequence<Norm::kStatistics.size()>,
          typename = std::make_index_sequence<Norm::kHasOffset>>
struct NormLinear;

template <typename Norm, size_t... v, size_t... s, size_t... o>
struct NormLinear<Norm, std::index_sequence<v...>, std::index_sequence<s...>,
                  std::index_sequence<o...>> {
  using Vectors = NormVectors<sizeof...(v)>;
  using Statistics = NormStatistics<sizeof...(s)>;
  using Mask = std::array<bool, 3 + sizeof...(v)>;
  using Forward = std::tuple<Tensor, Tensor, Repeat<Tensor, s>...>;
  using Grads = std::tuple<Tensor, Tensor, Tensor, Repeat<Tensor, v>...>;

  // Returns weight_offset, or 0 if the op has none.
  static double offset_of(Repeat<double, o>... weight_offset) {
    return (weight_offset + ... + 0.0);
  }

  static std::vector<c10::SymInt> check_tensors(const char* op, const Tensor& x,
                                                const Tensor& weight, const OptionalTensor& bias,
                                                const Vectors& vectors) {
    const auto sizes = check_linear(op, x, "weight", weight, bias);
    (check_vector(op, Norm::kVectors[v], vectors[v], x.sym_size(-1), "(K,)", x), ...);
    return sizes;
  }

  // Checks the arguments of an op and returns the sizes of y.
  static std::vector<c10::SymInt> check(const char* op, const Tensor& x, const Tensor& weight,
                                        const OptionalTensor& bias,
                                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                                        Repeat<double, o>... weight_offset,
                                        c10::string_view activation) {
    const auto sizes = check_tensors(op, x, weight, bias, {vectors...});
    check_eps(op, eps);
    check_weight_offset(op, Norm::kVectors[0], Vectors{vectors...}[0], offset_of(weight_offset...));
    parse_activation(op, activation);
    return sizes;
  }

  static Tensor op_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                        Repeat<double, o>... weight_offset, c10::string_view activation) {
    return empty_result(
        x, check(Norm::kOp, x, weight, bias, vectors..., eps, weight_offset..., activation));
  }

  static Forward forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              Repeat<double, o>... weight_offset, c10::string_view activation) {
    const char* op = Norm::kForward;
    const auto sizes = check(op, x, weight, bias, vectors..., eps, weight_offset..., activation);
    const bool saves = saves_preact(parse_activation(op, activation));
    const auto statistic = [&](size_t) {
      return at::empty_symint(without_last(x), x.options().dtype(acc_dtype(x)));
    };
    return {empty_result(x, sizes), saves ? empty_result(x, sizes) : at::empty({0}, x.options()),
            statistic(s)...};
  }

  static Grads backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                             Repeat<const OptionalTensor&, v>... vectors,
                             Repeat<const Tensor&, s>... statistics, const OptionalTensor& preact,
                             Repeat<double, o>... weight_offset, c10::string_view activation,
                             Mask output_mask) {
    const char* op = Norm::kBackward;
    const auto sizes = check_tensors(op, x, weight, std::nullopt, {vectors...});
    check_weight_offset(op, Norm::kVectors[0], Vectors{vectors...}[0], offset_of(weight_offset...));
    check_dy(op, dy, sizes, x);
    check_preact(op, preact, parse_activation(op, activation), sizes, x);
    (check_statistic(op, Norm::kStatistics[s], statistics, x), ...);
    return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
            empty_vector_grad(weight, weight.sym_size(0), output_mask[2]),
            empty_vector_grad(x, x.sym_size(-1), output_mask[3 + v] && is_given(vectors))...};
  }

  static Tensor op_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       Repeat<const OptionalTensor&, v>... vectors, double eps,
                       Repeat<double, o>... weight_offset, c10::string_view activation) {
    Tensor y = op_meta(x, weight, bias, vectors..., eps, weight_offset..., activation);
    if (y.numel() == 0) return y;
    linear_into(y, Norm::normalise(x, {vectors...}, eps, offset_of(weight_offset...)).first, weight,
                bias, parse_activation(Norm::kOp, activation));
    return y;
  }

  static Forward forward_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             Repeat<const OptionalTensor&, v>... vectors, double eps,
                             Repeat<double, o>... weight_offset, c10::string_view activation) {
    Forward results = forward_meta(x, weight, bias, vectors..., eps, weight_offset..., activation);
    auto &y = std::get<0>(results), &preact = std::get<1>(results);
    const auto [normalised, statistics] =
        Norm::normalise(x, {vectors...}, eps, offset_of(weight_offset...));
    const Statistics from = statistics;  // a fold expression can't name a structured binding
    (std::get<2 + s>(results).copy_(from[s]), ...);
    if (y.numel() == 0) return results;
    const Activation act = parse_activation(Norm::kForward, activation);
    if (saves_preact(act)) {
      linear_into(preact, normalised, weight, bias);
      activate_into(y, preact, act);
    } else {
      linear_into(y, normalised, weight, bias, act);
    }
    return results;
  }

  static Grads backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                            Repeat<const OptionalTensor&, v>... vectors,
                            Repeat<const Tensor&, s>... statistics, const OptionalTensor& preact,
                            Repeat<double, o>... weight_offset, c10::string_view activation,
                            Mask output_mask) {
    Grads grads = backward_meta(dy, x, weight, vectors..., statistics..., preact, weight_offset...,
                                activation, output_mask);
    const double offset = offset_of(weight_offset...);
    const Tensor dz =
        as_matrix(activation_backward(dy, preact, parse_activation(Norm::kBackward, activation)));
    const bool wants_rows = output_mask[0] || (output_mask[3 + v] || ...);
    const Tensor normalised =
        output_mask[1] ? as_matrix(Norm::normalise_again(x, {vectors...}, {statistics...}, offset))
                       : Tensor();
    Tensor dnormalised = wants_rows ? at::empty(x.sizes(), x.options()) : Tensor();
    linear_backward_into(dnormalised, std::get<1>(grads), std::get<2>(grads),
                         {wants_rows, output_mask[1], output_mask[2]}, dz, normalised, weight);
    if (wants_rows && x.numel() == 0) {
      (std::get<3 + v>(grads).zero_(), ...);
    } else if (wants_rows) {
      Norm::backward({std::get<0>(grads), std::get<3 + v>(grads)...}, dnormalised, x, {vectors...},
                     {statistics...}, offset);
    }
    return grads;
  }

#ifdef TORCHWELD_CUDA

  static Tensor op_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                        Repeat<double, o>... weight_offset, c10::string_view activation) {
    Tensor y = op_meta(x, weight, bias, vectors..., eps, weight_offset..., activation);
    if (y.numel() == 0) return y;
    const OnDevice on(x.device());
    norm_matmul_into(rows_of(y), row_norm(Vectors{vectors...}, offset_of(weight_offset...)), x, eps,
                     weight, {bias, parse_activation(Norm::kOp, activation)});
    return y;
  }

  static Forward forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              Repeat<double, o>... weight_offset, c10::string_view activation) {
    const Forward results =
        forward_meta(x, weight, bias, vectors..., eps, weight_offset..., activation);
    const Tensor& y = std::get<0>(results);
    const OnDevice on(x.device());
    const RowNorm norm = row_norm(Vectors{vectors...}, offset_of(weight_offset...));
    const RowStatistics statistics = statistics_of(Statistics{std::get<2 + s>(results)...});
    if (y.numel() == 0) {
      run_norm(norm, x, eps, statistics, {}, {});
      return results;
    }
    MatmulEpilogue epilogue = {bias, parse_activation(Norm::kForward, activation)};
    if (saves_preact(epilogue.activation)) epilogue.preact = std::get<1>(results);
    norm_matmul_into(rows_of(y), norm, x, eps, weight, epilogue, statistics);
    return results;
  }

  static Grads backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                             Repeat<const OptionalTensor&, v>... vectors,
                             Repeat<const Tensor&, s>... statistics, const OptionalTensor& preact,
                             Repeat<double, o>... weight_offset, c10::string_view activation,
                             Mask output_mask) {
    const Grads grads = backward_meta(dy, x, weight, vectors..., statistics..., preact,
                                      weight_offset..., activation, output_mask);
    const OnDevice on(x.device());
    const Activation act = parse_activation(Norm::kBackward, activation);
    const Tensor &dbias = std::get<2>(grads), nothing = dbias.narrow(0, 0, 0);
    const bool beside = bias_beside_weight(output_mask[1], act);
    const Tensor dz = activation_backward_into(beside ? nothing : dbias, dy, preact, act);
    const std::array<Tensor, 3> dvectors = {std::get<3 + v>(grads)..., nothing};
    const Tensor& dweight = std::get<1>(grads);
    norm_matmuls_backward_into(
        std::get<0>(grads), output_mask[1] ? at::TensorList(dweight) : at::TensorList(),
        beside ? at::TensorList(dbias) : at::TensorList(), dvectors[0], dvectors[1], output_mask[0],
        row_norm(Vectors{vectors...}, offset_of(weight_offset...)), dz, x, weight,
        statistics_of(Statistics{statistics...}));
    return grads;
  }
#endif

  using Call = NamedOpCall<decltype(op_meta), &Norm::kOp>;
  using ForwardCall = NamedOpCall<decltype(forward_meta), &Norm::kForward>;
  using BackwardCall = NamedOpCall<decltype(backward_meta), &Norm::kBackward>;

  struct Function : torch::autograd::Function<Function> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                                 const OptionalTensor& bias,
                                 Repeat<const OptionalTensor&, v>... vectors, double eps,
                                 Repeat<double, o>... weight_offset, c10::string_view activation) {
      const Forward results =
          ForwardCall().below(x, weight, bias, vectors..., eps, weight_offset..., activation);
      const auto &y = std::get<0>(results), &preact = std::get<1>(results);
      const Activation act = parse_activation(Norm::kOp, activation);
      const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
      ctx->save_for_backward(
          {x, weight, saved, or_undefined(vectors)..., std::get<2 + s>(results)...});
      Donation::prepare(ctx);
      ((ctx->saved_data["weight_offset"] = weight_offset), ...);
      ctx->saved_data["activation"] = activation;
      ctx->saved_data["bias"] = is_given(bias);
      return outputs_of(ctx, {y, preact, std::get<2 + s>(results)...});
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
      // The gradients of all inputs of `forward`. Autograd expects an entry for eps, weight_offset
      // and activation too.
      variable_list inputs(5 + sizeof...(v) + sizeof...(o));
      if (!dys[0].defined()) return inputs;
      const auto saved = ctx->get_saved_variables();
      const Tensor &x = saved[0], &weight = saved[1];
      const Tensor *vectors = &saved[3], *statistics = vectors + sizeof...(v);
      AskedGradients asked(ctx);
      const Mask wanted = {asked.next(), asked.next(), asked.next(ctx->saved_data["bias"].toBool()),
                           asked.next(vectors[v].defined())...};
      const Donation preact(ctx, saved[2], dys[0]);
      const Grads grads = BackwardCall()(
          dys[0], x, weight, optional(vectors[v])..., statistics[s]..., optional(saved[2]),
          Repeat<at::IValue, o>(ctx->saved_data["weight_offset"]).toDouble()...,
          ctx->saved_data["activation"].toStringRef(), wanted);
      inputs[0] = if_wanted(wanted[0], std::get<0>(grads));
      inputs[1] = if_wanted(wanted[1], std::get<1>(grads));
      inputs[2] = if_wanted(wanted[2], std::get<2>(grads));
      ((inputs[3 + v] = if_wanted(wanted[3 + v], std::get<3 + v>(grads))), ...);
      return inputs;
    }
  };

  // Registers the ops <op>, <op>_forward and <op>_backward, and the autocast kernels of <op> and
  // <op>_forward.
  static void define(torch::Library& m, const char* op, const char* forward, const char* backward) {
    define_op(m, op, TW_KERNELS(op), recorded_by<Function>(Call(), check));
    define_op(m, forward, TW_KERNELS(forward), recorded_by<Function>(ForwardCall()));
    define_op(m, backward, TW_KERNELS(backward), no_gradient_function());
    define_autocast(m, Call());
    define_autocast(m, ForwardCall());
  }
};

}  // namespace torchweld
