// Defines an op that normalises the rows of x and multiplies them by a weight, and its gradient:
//   y = activation(norm(x) @ weight.T + bias)
//   x (..., K), weight (N, K), bias (N,), y (..., N)
//
// <op>_forward also returns what the gradient needs. This is the pre-activation (a tensor of size
// (0,) if the gradient does not need it, as in linear) and the statistics of the rows. The
// statistics have shape (...) and are fp32, or fp64 for fp64 inputs. The backward computes the
// normalised rows again from the statistics, so the normalised rows are not kept in memory.
#pragma once

#include "core/dispatch.h"
#include "layers/linear_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld {

// The vectors (K,) and the statistics (...) of a norm. LayerNorm has the vectors scale and shift
// and the statistics mean and rstd, in these orders. RMSNorm has only scale and rstd.
template <size_t kCount>
using NormVectors = std::array<OptionalTensor, kCount>;
template <size_t kCount>
using NormStatistics = std::array<Tensor, kCount>;

template <typename T, size_t>
using Repeat = T;

// `Norm` must have
//   kOp, kForward, kBackward  the names of the ops
//   kVectors, kStatistics     the names of the arguments
//   normalise                 CPU: computes the normalised rows, in x's dtype, and the statistics
//   normalise_again           CPU: computes the normalised rows from saved statistics
//   backward                  CPU: computes the gradients from the gradient of the normalised rows
template <typename Norm, typename = std::make_index_sequence<Norm::kVectors.size()>,
          typename = std::make_index_sequence<Norm::kStatistics.size()>>
struct NormLinear;

template <typename Norm, size_t... v, size_t... s>
struct NormLinear<Norm, std::index_sequence<v...>, std::index_sequence<s...>> {
  using Vectors = NormVectors<sizeof...(v)>;
  using Statistics = NormStatistics<sizeof...(s)>;
  using Mask = std::array<bool, 3 + sizeof...(v)>;
  using Forward = std::tuple<Tensor, Tensor, Repeat<Tensor, s>...>;
  using Grads = std::tuple<Tensor, Tensor, Tensor, Repeat<Tensor, v>...>;

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
                                        c10::string_view activation) {
    const auto sizes = check_tensors(op, x, weight, bias, {vectors...});
    check_eps(op, eps);
    parse_activation(op, activation);
    return sizes;
  }

  static Tensor op_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                        c10::string_view activation) {
    return empty_result(x, check(Norm::kOp, x, weight, bias, vectors..., eps, activation));
  }

  static Forward forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              c10::string_view activation) {
    const char* op = Norm::kForward;
    const auto sizes = check(op, x, weight, bias, vectors..., eps, activation);
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
                             c10::string_view activation, Mask output_mask) {
    const char* op = Norm::kBackward;
    const auto sizes = check_tensors(op, x, weight, std::nullopt, {vectors...});
    check_dy(op, dy, sizes, x);
    check_preact(op, preact, parse_activation(op, activation), sizes, x);
    (check_statistic(op, Norm::kStatistics[s], statistics, x), ...);
    return {empty_input_grad(x, output_mask[0]), empty_weight_grad(weight, output_mask[1]),
            empty_vector_grad(weight, weight.sym_size(0), output_mask[2]),
            empty_vector_grad(x, x.sym_size(-1), output_mask[3 + v] && is_given(vectors))...};
  }

  static Tensor op_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       Repeat<const OptionalTensor&, v>... vectors, double eps,
                       c10::string_view activation) {
    Tensor y = op_meta(x, weight, bias, vectors..., eps, activation);
    if (y.numel() == 0) return y;
    linear_into(y, Norm::normalise(x, {vectors...}, eps).first, weight, bias,
                parse_activation(Norm::kOp, activation));
    return y;
  }

  static Forward forward_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             Repeat<const OptionalTensor&, v>... vectors, double eps,
                             c10::string_view activation) {
    Forward results = forward_meta(x, weight, bias, vectors..., eps, activation);
    auto &y = std::get<0>(results), &preact = std::get<1>(results);
    const auto [normalised, statistics] = Norm::normalise(x, {vectors...}, eps);
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
                            c10::string_view activation, Mask output_mask) {
    Grads grads =
        backward_meta(dy, x, weight, vectors..., statistics..., preact, activation, output_mask);
    const Tensor dz =
        as_matrix(activation_backward(dy, preact, parse_activation(Norm::kBackward, activation)));
    const bool wants_rows = output_mask[0] || (output_mask[3 + v] || ...);
    const Tensor normalised =
        output_mask[1] ? as_matrix(Norm::normalise_again(x, {vectors...}, {statistics...}))
                       : Tensor();
    Tensor dnormalised = wants_rows ? at::empty(x.sizes(), x.options()) : Tensor();
    linear_backward_into(dnormalised, std::get<1>(grads), std::get<2>(grads),
                         {wants_rows, output_mask[1], output_mask[2]}, dz, normalised, weight);
    if (wants_rows && x.numel() == 0) {
      (std::get<3 + v>(grads).zero_(), ...);
    } else if (wants_rows) {
      Norm::backward({std::get<0>(grads), std::get<3 + v>(grads)...}, output_mask[0], dnormalised,
                     x, {vectors...}, {statistics...});
    }
    return grads;
  }

#ifdef TORCHWELD_CUDA
  static RowNorm row_norm(const Vectors& vectors) {
    RowNorm norm = {/*centred=*/sizeof...(s) == 2, vectors[0]};
    if constexpr (sizeof...(v) == 2) norm.shift = vectors[1];
    return norm;
  }

  static RowStatistics row_statistics(const Statistics& statistics) {
    if constexpr (sizeof...(s) == 2)
      return {statistics[0], statistics[1]};
    else
      return {std::nullopt, statistics[0]};
  }

  static Tensor op_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                        c10::string_view activation) {
    Tensor y = op_meta(x, weight, bias, vectors..., eps, activation);
    if (y.numel() == 0) return y;
    const OnDevice on(x.device());
    norm_matmul_into(rows_of(y), row_norm({vectors...}), x, eps, weight,
                     {bias, parse_activation(Norm::kOp, activation)});
    return y;
  }

  static Forward forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              c10::string_view activation) {
    const Forward results = forward_meta(x, weight, bias, vectors..., eps, activation);
    const Tensor& y = std::get<0>(results);
    const OnDevice on(x.device());
    const RowNorm norm = row_norm({vectors...});
    const RowStatistics statistics = row_statistics({std::get<2 + s>(results)...});
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
                             c10::string_view activation, Mask output_mask) {
    const Grads grads =
        backward_meta(dy, x, weight, vectors..., statistics..., preact, activation, output_mask);
    const OnDevice on(x.device());
    const Activation act = parse_activation(Norm::kBackward, activation);
    const Tensor &dbias = std::get<2>(grads), nothing = dbias.narrow(0, 0, 0);
    const bool beside = bias_beside_weight(output_mask[1], act);
    const Tensor dz = activation_backward_into(beside ? nothing : dbias, dy, preact, act);
    const Tensor no_shift = empty_vector_grad(x, 0, /*wanted=*/false);
    const std::array<Tensor, 3> dvectors = {std::get<3 + v>(grads)..., no_shift};
    norm_matmul_backward_into(std::get<0>(grads), std::get<1>(grads), beside ? dbias : nothing,
                              dvectors[0], dvectors[1], output_mask[0], output_mask[1],
                              row_norm({vectors...}), dz, x, weight,
                              row_statistics({statistics...}));
    return grads;
  }
#endif

  struct Call : OpCall<Call, decltype(op_meta)> {
    static constexpr const char* kName = Norm::kOp;
  };
  struct ForwardCall : OpCall<ForwardCall, decltype(forward_meta)> {
    static constexpr const char* kName = Norm::kForward;
  };
  struct BackwardCall : OpCall<BackwardCall, decltype(backward_meta)> {
    static constexpr const char* kName = Norm::kBackward;
  };

  struct Function : torch::autograd::Function<Function> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                                 const OptionalTensor& bias,
                                 Repeat<const OptionalTensor&, v>... vectors, double eps,
                                 c10::string_view activation) {
      const Forward results = ForwardCall().below(x, weight, bias, vectors..., eps, activation);
      const auto &y = std::get<0>(results), &preact = std::get<1>(results);
      const Activation act = parse_activation(Norm::kOp, activation);
      const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
      ctx->save_for_backward(
          {x, weight, saved, or_undefined(vectors)..., std::get<2 + s>(results)...});
      Donation::prepare(ctx);
      ctx->saved_data["activation"] = activation;
      ctx->saved_data["bias"] = is_given(bias) && bias->requires_grad();
      return outputs_of(ctx, {y, preact, std::get<2 + s>(results)...});
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
      // The gradients of all inputs of `forward`: the tensors, eps and activation. Autograd expects
      // an entry for eps and activation too.
      variable_list inputs(5 + sizeof...(v));
      if (!dys[0].defined()) return inputs;
      const auto saved = ctx->get_saved_variables();
      const Tensor &x = saved[0], &weight = saved[1];
      const Tensor *vectors = &saved[3], *statistics = vectors + sizeof...(v);
      const Mask wanted = {x.requires_grad(), weight.requires_grad(),
                           ctx->saved_data["bias"].toBool(),
                           vectors[v].defined() && vectors[v].requires_grad()...};
      const Donation preact(ctx, saved[2], dys[0]);
      const Grads grads =
          BackwardCall()(dys[0], x, weight, optional(vectors[v])..., statistics[s]...,
                         optional(saved[2]), ctx->saved_data["activation"].toStringRef(), wanted);
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
