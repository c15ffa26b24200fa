// Defines the ops rms_norm, layer_norm, add_rms_norm and add_layer_norm, with their gradients:
//   y = (r - mean) * rstd * (weight + weight_offset) + bias,  rstd = 1 / sqrt(var(r) + eps)
//   x, residual, y (..., n), weight and bias (n,); weight and bias may be fp32 beside 16-bit rows
// In rms_norm and layer_norm, r is x. In an add_ op, r is x + residual, rounded to the dtype of x
// and residual. In RMSNorm the mean is 0, and there is no bias. LayerNorm has no weight_offset.
//
// An add_ op also returns r as `sum`, and dsum is the gradient with respect to `sum`. dx is the
// gradient with respect to x and also with respect to the residual:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum,  g = dy * (weight + weight_offset)
//   xhat = (r - mean) * rstd; in RMSNorm, the term mean(g) is absent
// <op>_forward also returns the statistics mean and rstd, of shape (...). They are fp32, or fp64
// for fp64 inputs.
#pragma once

#include <ATen/ops/zeros_like.h>

#include "core/dispatch.h"
#include "core/linear_common.h"
#include "norm/rows.h"

namespace torchweld {

// Checks the weight (n,) of a norm. It has the dtype of x or that of the statistics. Error messages
// call x `x_name`.
inline void check_norm_weight(const char* op, const char* x_name, const Tensor& x,
                              const OptionalTensor& weight, double weight_offset) {
  if (is_given(weight)) {
    check_device(op, "weight", *weight, x_name, x);
    if (weight->scalar_type() != acc_dtype(x)) check_like(op, "weight", *weight, x_name, x);
    check_shape(op, "weight", *weight, {x.sym_size(-1)}, "(n,)");
  }
  check_weight_offset(op, "weight", weight, weight_offset);
}

// Returns the tensor whose dtype the vectors of a norm and their gradients have.
inline const Tensor& vectors_like(const Tensor& x, const OptionalTensor& weight) {
  return is_given(weight) ? *weight : x;
}

// `Norm` describes one of the ops. It must have these members:
//   kOp, kForward, kBackward  the names of the op, of <op>_forward and of <op>_backward
//   kCentred                  true for LayerNorm, which has a bias and a mean but no weight_offset
//   kAdds                     true for an add_ op, which adds a residual and also returns the sum
template <typename Norm, typename = std::make_index_sequence<Norm::kAdds>,
          typename = std::make_index_sequence<Norm::kCentred>,
          typename = std::make_index_sequence<!Norm::kCentred>>
struct NormOp;

// Each of the index packs r, c and o has one index or none. r has an index if the op has a residual
// and a sum. c has an index if the op is a LayerNorm, which has a bias and a mean. o has an index
// if the op has a weight_offset.
template <typename Norm, size_t... r, size_t... c, size_t... o>
struct NormOp<Norm, std::index_sequence<r...>, std::index_sequence<c...>,
              std::index_sequence<o...>> {
  template <typename T, size_t>
  using Repeat = T;
  static constexpr bool kAdds = Norm::kAdds, kCentred = Norm::kCentred;
  static constexpr const char* kRows = kAdds ? "sum" : "x";
  using Result = std::conditional_t<kAdds, std::tuple<Tensor, Tensor>, Tensor>;
  using Forward = std::tuple<Tensor, Repeat<Tensor, r>..., Repeat<Tensor, c>..., Tensor>;
  using Grads = std::tuple<Tensor, Tensor, Repeat<Tensor, c>...>;
  using Mask = std::array<bool, 2 + sizeof...(c)>;

  static NormInputs inputs(const Tensor& x, Repeat<const Tensor&, r>... residual,
                           const OptionalTensor& weight, Repeat<const OptionalTensor&, c>... bias,
                           double eps, Repeat<double, o>... weight_offset) {
    NormInputs in{kCentred, x, std::nullopt, weight, std::nullopt, eps, 0, {}};
    ((in.residual = residual), ...);
    ((in.bias = bias), ...);
    ((in.weight_offset = weight_offset), ...);
    return in;
  }

  static void check_inputs(const char* op, const NormInputs& in) {
    const Tensor& x = in.x;
    check_floating(op, "x", x);
    check_min_dim(op, "x", x, 1, "(..., n)");
    if (is_given(in.residual)) {
      check_like(op, "residual", *in.residual, "x", x);
      check_shape(op, "residual", *in.residual, x.sym_sizes(), "x's shape");
    }
    check_norm_weight(op, "x", x, in.weight, in.weight_offset);
    check_vector(op, "bias", in.bias, x.sym_size(-1), "(n,)", vectors_like(x, in.weight),
                 is_given(in.weight) ? "weight" : "x");
    check_eps(op, in.eps);
  }

  static void check(const char* op, const Tensor& x, Repeat<const Tensor&, r>... residual,
                    const OptionalTensor& weight, Repeat<const OptionalTensor&, c>... bias,
                    double eps, Repeat<double, o>... weight_offset) {
    check_inputs(op, inputs(x, residual..., weight, bias..., eps, weight_offset...));
  }

  static NormResults empty_results(const char* op, const NormInputs& in, bool statistics) {
    check_inputs(op, in);
    NormResults out;
    out.y = empty_result(in.x, in.x.sym_sizes());
    if (kAdds) out.sum = empty_result(in.x, in.x.sym_sizes());
    const auto options = in.x.options().dtype(acc_dtype(in.x));
    if (statistics && kCentred) out.mean = at::empty_symint(without_last(in.x), options);
    if (statistics) out.rstd = at::empty_symint(without_last(in.x), options);
    return out;
  }

  static Result result_of(const NormResults& out) {
    if constexpr (kAdds) {
      return {out.y, out.sum};
    } else {
      return out.y;
    }
  }
  static Forward forward_of(const NormResults& out) {
    return {out.y, Repeat<const Tensor&, r>(out.sum)..., Repeat<const Tensor&, c>(out.mean)...,
            out.rstd};
  }

  static Result op_meta(const Tensor& x, Repeat<const Tensor&, r>... residual,
                        const OptionalTensor& weight, Repeat<const OptionalTensor&, c>... bias,
                        double eps, Repeat<double, o>... weight_offset) {
    return result_of(empty_results(
        Norm::kOp, inputs(x, residual..., weight, bias..., eps, weight_offset...), false));
  }

  static Forward forward_meta(const Tensor& x, Repeat<const Tensor&, r>... residual,
                              const OptionalTensor& weight,
                              Repeat<const OptionalTensor&, c>... bias, double eps,
                              Repeat<double, o>... weight_offset) {
    return forward_of(empty_results(
        Norm::kForward, inputs(x, residual..., weight, bias..., eps, weight_offset...), true));
  }

  static NormUpstream upstream(const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                               Repeat<const Tensor&, c>... mean, const Tensor& rstd,
                               Repeat<const OptionalTensor&, r>... dsum,
                               Repeat<double, o>... weight_offset) {
    NormUpstream in{kCentred, dy, x, weight, {}, rstd, std::nullopt, 0};
    ((in.mean = mean), ...);
    ((in.dsum = optional(or_undefined(dsum))), ...);
    ((in.weight_offset = weight_offset), ...);
    return in;
  }

  static Grads backward_meta(const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                             Repeat<const Tensor&, c>... mean, const Tensor& rstd,
                             Repeat<const OptionalTensor&, r>... dsum,
                             Repeat<double, o>... weight_offset, Mask output_mask) {
    const char* op = Norm::kBackward;
    const NormUpstream in = upstream(dy, x, weight, mean..., rstd, dsum..., weight_offset...);
    check_floating(op, kRows, x);
    check_min_dim(op, kRows, x, 1, "(..., n)");
    const char* dy_name = kAdds ? "dnormed" : "dy";
    check_like(op, dy_name, dy, kRows, x);
    check_shape(op, dy_name, dy, x.sym_sizes(), kAdds ? "sum's shape" : "x's shape");
    check_norm_weight(op, kRows, x, weight, in.weight_offset);
    if (kCentred) check_statistic(op, "mean", in.mean, x, kRows);
    check_statistic(op, "rstd", rstd, x, kRows);
    if (is_given(in.dsum)) {
      check_like(op, "dsum", *in.dsum, kRows, x);
      check_shape(op, "dsum", *in.dsum, x.sym_sizes(), "sum's shape");
    }
    const Tensor& like = vectors_like(x, weight);
    return {empty_input_grad(x, output_mask[0]),
            empty_vector_grad(like, x.sym_size(-1), output_mask[1] && is_given(weight)),
            empty_vector_grad(like, x.sym_size(-1), output_mask[2 + c])...};
  }

  template <NormForwardEngine engine>
  static Result op_on(const Tensor& x, Repeat<const Tensor&, r>... residual,
                      const OptionalTensor& weight, Repeat<const OptionalTensor&, c>... bias,
                      double eps, Repeat<double, o>... weight_offset) {
    const NormInputs in = inputs(x, residual..., weight, bias..., eps, weight_offset...);
    const NormResults out = empty_results(Norm::kOp, in, false);
    engine(in, out);
    return result_of(out);
  }

  template <NormForwardEngine engine>
  static Forward forward_on(const Tensor& x, Repeat<const Tensor&, r>... residual,
                            const OptionalTensor& weight, Repeat<const OptionalTensor&, c>... bias,
                            double eps, Repeat<double, o>... weight_offset) {
    const NormInputs in = inputs(x, residual..., weight, bias..., eps, weight_offset...);
    const NormResults out = empty_results(Norm::kForward, in, true);
    engine(in, out);
    return forward_of(out);
  }

  template <NormBackwardEngine engine>
  static Grads backward_on(const Tensor& dy, const Tensor& x, const OptionalTensor& weight,
                           Repeat<const Tensor&, c>... mean, const Tensor& rstd,
                           Repeat<const OptionalTensor&, r>... dsum,
                           Repeat<double, o>... weight_offset, Mask output_mask) {
    const Grads grads =
        backward_meta(dy, x, weight, mean..., rstd, dsum..., weight_offset..., output_mask);
    Tensor dbias = empty_vector_grad(x, 0, false);
    ((dbias = std::get<2 + c>(grads)), ...);
    engine(upstream(dy, x, weight, mean..., rstd, dsum..., weight_offset...),
           {std::get<0>(grads), std::get<1>(grads), dbias});
    return grads;
  }

  using Call = NamedOpCall<decltype(op_meta), &Norm::kOp>;
  using ForwardCall = NamedOpCall<decltype(forward_meta), &Norm::kForward>;
  using BackwardCall = NamedOpCall<decltype(backward_meta), &Norm::kBackward>;

  struct Function : torch::autograd::Function<Function> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x,
                                 Repeat<const Tensor&, r>... residual, const OptionalTensor& weight,
                                 Repeat<const OptionalTensor&, c>... bias, double eps,
                                 Repeat<double, o>... weight_offset) {
      const Forward results =
          ForwardCall().below(x, residual..., weight, bias..., eps, weight_offset...);
      const Tensor& y = std::get<0>(results);
      const variable_list sum = {std::get<1 + r>(results)...};
      const variable_list statistics = {std::get<1 + kAdds + c>(results)...,
                                        std::get<1 + kAdds + kCentred>(results)};
      variable_list saved = {kAdds ? sum[0] : x, or_undefined(weight)};
      saved.insert(saved.end(), statistics.begin(), statistics.end());
      ctx->save_for_backward(std::move(saved));
      ctx->mark_non_differentiable(statistics);
      ctx->set_materialize_grads(false);
      ctx->saved_data["bias"] = (is_given(bias) || ...);
      ((ctx->saved_data["weight_offset"] = weight_offset), ...);
      variable_list outputs = {y};
      outputs.insert(outputs.end(), sum.begin(), sum.end());
      outputs.insert(outputs.end(), statistics.begin(), statistics.end());
      return outputs;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
      // Autograd expects an entry for eps and weight_offset too.
      variable_list inputs(3 + kAdds + kCentred + !kCentred);
      const Tensor dsum = kAdds ? grads[1] : Tensor();
      if (!grads[0].defined()) {
        // If y has no gradient, dsum is the gradient with respect to x and to the residual.
        inputs[0] = dsum;
        ((inputs[1 + r] = dsum), ...);
        return inputs;
      }
      const auto saved = ctx->get_saved_variables();
      const Tensor &x = saved[0], &weight = saved[1];
      AskedGradients asked(ctx);
      Mask wanted = {asked.any_of_next(1 + kAdds), asked.next(weight.defined())};
      ((wanted[2 + c] = asked.next(ctx->saved_data["bias"].toBool())), ...);
      const Grads results = BackwardCall()(
          grads[0], x, optional(weight), saved[2 + c]..., saved[2 + kCentred],
          Repeat<OptionalTensor, r>(optional(dsum))...,
          Repeat<at::IValue, o>(ctx->saved_data["weight_offset"]).toDouble()..., wanted);
      inputs[0] = if_wanted(wanted[0], std::get<0>(results));
      ((inputs[1 + r] = inputs[0]), ...);
      inputs[1 + kAdds] = if_wanted(wanted[1], std::get<1>(results));
      ((inputs[2 + kAdds + c] = if_wanted(wanted[2 + c], std::get<2 + c>(results))), ...);
      return inputs;
    }
  };

  // Under autocast, the op computes in the dtype of x. If x and residual have different dtypes, the
  // op uses the dtype that x + residual has in torch. An fp32 weight stays in fp32, and bias is
  // cast to the dtype of the weight.
  template <at::DeviceType device>
  static torch::CppFunction autocast() {
    return torch::CppFunction([](const Tensor& x, Repeat<const Tensor&, r>... residual,
                                 const OptionalTensor& weight,
                                 Repeat<const OptionalTensor&, c>... bias, double eps,
                                 Repeat<double, o>... weight_offset) -> Result {
      Autocast<device> cast;
      cast.dtype = x.scalar_type();
      ((cast.dtype = c10::promoteTypes(cast.dtype, residual.scalar_type())), ...);
      const Tensor rows = cast(x);
      Autocast<device> cast_vector;
      const bool keeps = is_given(weight) && weight->scalar_type() == acc_dtype(rows);
      cast_vector.dtype = keeps ? weight->scalar_type() : rows.scalar_type();
      return Call()(rows, cast(residual)..., cast_vector(weight), cast_vector(bias)..., eps,
                    weight_offset...);
    });
  }

  // Defines the ops <op>, <op>_forward and <op>_backward.
  static void define(torch::Library& m) {
    const std::string op = Norm::kOp, x = kAdds ? "Tensor x, Tensor residual" : "Tensor x";
    const std::string vectors =
        kCentred ? ", Tensor? weight=None, Tensor? bias=None" : ", Tensor? weight=None";
    const std::string offset = kCentred ? "" : "float weight_offset=0, ";
    const std::string options =
        kCentred ? ", *, float eps=1e-5" : ", *, float eps=1e-6, float weight_offset=0";
    const std::string statistics = kCentred ? "Tensor mean, Tensor rstd" : "Tensor rstd";
    const std::string arguments = "(" + x + vectors + options + ") -> ";
    const auto autograd = [] { return recorded_by<Function>(Call(), check); };
    define_op(m, op + arguments + (kAdds ? "(Tensor normed, Tensor sum)" : "Tensor"),
              Kernels{torch::CppFunction(op_meta), torch::CppFunction(op_on<norm_forward_cpu>),
                      TW_CUDA_KERNEL(op_on<norm_forward_cuda>)},
              autograd());
    define_op(
        m,
        op + "_forward" + arguments + (kAdds ? "(Tensor normed, Tensor sum, " : "(Tensor y, ") +
            statistics + ")",
        Kernels{torch::CppFunction(forward_meta), torch::CppFunction(forward_on<norm_forward_cpu>),
                TW_CUDA_KERNEL(forward_on<norm_forward_cuda>)},
        kAdds ? no_gradient_function() : recorded_by<Function>(ForwardCall()));
    define_op(m,
              op + "_backward(Tensor " + (kAdds ? "dnormed, Tensor sum" : "dy, Tensor x") +
                  ", Tensor? weight, " + statistics + (kAdds ? ", Tensor? dsum=None" : "") +
                  ", *, " + offset + "bool[" + (kCentred ? "3" : "2") +
                  "] output_mask) -> (Tensor dx, Tensor dweight" +
                  (kCentred ? ", Tensor dbias)" : ")"),
              Kernels{torch::CppFunction(backward_meta),
                      torch::CppFunction(backward_on<norm_backward_cpu>),
                      TW_CUDA_KERNEL(backward_on<norm_backward_cuda>)},
              no_gradient_function());
    m.impl(Norm::kOp, torch::dispatch(c10::DispatchKey::AutocastCPU, autocast<at::kCPU>()));
    m.impl(Norm::kOp, torch::dispatch(c10::DispatchKey::AutocastCUDA, autocast<at::kCUDA>()));
  }
};

}  // namespace torchweld
