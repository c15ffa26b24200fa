// fold_layer_norm:           folded_weight = weight * ln_weight in the weight's dtype, (N, K)
//                            weight_sum    = folded_weight.sum(1), fp32, (N,)
//                            folded_bias   = bias + weight @ ln_bias, fp32, (N,)
// folded_layer_norm_linear:  y = activation(rstd * (x @ folded_weight.T - mean * weight_sum)
//                                           + folded_bias)
//                            with mean and rstd of each row of x (..., K); y (..., N)
//
// These ops compute layer_norm_linear for inference. ln_weight and ln_bias, the weights of the
// LayerNorm, are folded into the operands of the matmul. weight_sum is the sum of the rounded
// folded_weight. Therefore the formula cancels the mean exactly, except for the rounding of the
// accumulator. The kernels don't use the formula. They normalise the rows of x before the matmul,
// so that the error does not grow with |mean| / std. The formula and the kernels give the same
// result only if weight_sum holds the row sums of folded_weight. Callers must ensure this.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include "core/dispatch.h"
#include "layers/linear_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#include "ops/folded_layer_norm_linear/folded_linear.h"
#endif

namespace torchweld::folded_linear_op {
namespace {

using Folded = std::tuple<Tensor, Tensor, Tensor>;

Folded fold_layer_norm_meta(const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& ln_weight, const OptionalTensor& ln_bias) {
  const char* op = "fold_layer_norm";
  check_floating(op, "weight", weight);
  check_dim(op, "weight", weight, 2, "(N, K)");
  const auto beside_weight = [&](const char* name, const OptionalTensor& t, const c10::SymInt& size,
                                 const char* layout) {
    if (!is_given(t)) return;
    check_like(op, name, *t, "weight", weight);
    check_shape(op, name, *t, {size}, layout);
  };
  beside_weight("bias", bias, weight.sym_size(0), "(N,)");
  beside_weight("ln_weight", ln_weight, weight.sym_size(1), "(K,)");
  beside_weight("ln_bias", ln_bias, weight.sym_size(1), "(K,)");
  const auto sums = weight.options().dtype(acc_dtype(weight));
  return {at::empty_symint(weight.sym_sizes(), weight.options()),
          at::empty_symint({weight.sym_size(0)}, sums),
          at::empty_symint({weight.sym_size(0)}, sums)};
}

Folded fold_layer_norm_cpu(const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& ln_weight, const OptionalTensor& ln_bias) {
  auto [folded_weight, weight_sum, folded_bias] =
      fold_layer_norm_meta(weight, bias, ln_weight, ln_bias);
  folded_weight.copy_(is_given(ln_weight) ? weight * *ln_weight : weight);
  const auto dtype = acc_dtype(weight);
  weight_sum.copy_(folded_weight.sum(1, /*keepdim=*/false, dtype));
  folded_bias.zero_();
  if (is_given(bias)) folded_bias.copy_(*bias);
  if (is_given(ln_bias)) folded_bias.add_(at::mv(weight.to(dtype), ln_bias->to(dtype)));
  return {folded_weight, weight_sum, folded_bias};
}

std::vector<c10::SymInt> folded_checks(const char* op, const Tensor& x, const Tensor& folded_weight,
                                       const Tensor& weight_sum, const OptionalTensor& folded_bias,
                                       double eps) {
  const auto sizes = check_linear(op, x, "folded_weight", folded_weight, std::nullopt);
  const auto sums = [&](const char* name, const Tensor& t) {
    check_device(op, name, t, "x", x);
    check_dtype(op, name, t, acc_dtype(x));
    check_shape(op, name, t, {folded_weight.sym_size(0)}, "(N,)");
  };
  sums("weight_sum", weight_sum);
  if (is_given(folded_bias)) sums("folded_bias", *folded_bias);
  check_eps(op, eps);
  return sizes;
}

Tensor folded_layer_norm_linear_meta(const Tensor& x, const Tensor& folded_weight,
                                     const Tensor& weight_sum, const OptionalTensor& folded_bias,
                                     double eps, c10::string_view activation) {
  const char* op = "folded_layer_norm_linear";
  const auto sizes = folded_checks(op, x, folded_weight, weight_sum, folded_bias, eps);
  parse_activation(op, activation);
  return empty_result(x, sizes);
}
TW_OP(folded_layer_norm_linear);

Tensor folded_layer_norm_linear_backward_meta(const Tensor& dy, const Tensor& x,
                                              const Tensor& folded_weight, const Tensor& weight_sum,
                                              const OptionalTensor& folded_bias, double eps,
                                              c10::string_view activation) {
  const char* op = "folded_layer_norm_linear_backward";
  const auto sizes = folded_checks(op, x, folded_weight, weight_sum, folded_bias, eps);
  parse_activation(op, activation);
  check_dy(op, dy, sizes, x);
  return empty_input_grad(x, true);
}
TW_OP(folded_layer_norm_linear_backward);

// CPU: the rows of x, minus the rounded mean of each row. The statistics of these shifted rows do
// not lose digits if the mean of x is large. The fields `mean` and `rstd` (rows, 1) belong to the
// shifted rows. `mean` is only the rounding error of the subtracted mean, so it is small.
struct ShiftedRows {
  Tensor rows, normalised, mean, rstd;

  ShiftedRows(const Tensor& x, double eps) {
    const auto dtype = acc_dtype(x);
    rows = x.to(dtype) - x.mean(-1, /*keepdim=*/true, dtype);
    std::tie(normalised, mean, rstd) =
        at::native_layer_norm(rows, {rows.size(-1)}, std::nullopt, std::nullopt, eps);
  }
};

// CPU: returns the pre-activation (rows, N) in the dtype of the statistics. The rows are normalised
// before the matmul, so weight_sum is not needed.
Tensor folded_preact(const ShiftedRows& x, const Tensor& folded_weight,
                     const OptionalTensor& folded_bias) {
  const auto dtype = x.rstd.scalar_type();
  Tensor z = at::empty({x.rows.size(0), folded_weight.size(0)}, folded_weight.options());
  if (folded_weight.scalar_type() == dtype) {
    linear_into(z, x.normalised, folded_weight, folded_bias);
    return z;
  }
  linear_into(z, x.normalised.to(folded_weight.scalar_type()), folded_weight, std::nullopt);
  z = z.to(dtype);
  if (is_given(folded_bias)) z.add_(*folded_bias);
  return z;
}

Tensor folded_layer_norm_linear_cpu(const Tensor& x, const Tensor& folded_weight,
                                    const Tensor& weight_sum, const OptionalTensor& folded_bias,
                                    double eps, c10::string_view activation) {
  Tensor y =
      folded_layer_norm_linear_meta(x, folded_weight, weight_sum, folded_bias, eps, activation);
  if (y.numel() == 0) return y;
  const ShiftedRows rows(as_matrix(x), eps);
  Tensor z = folded_preact(rows, folded_weight, folded_bias);
  activate_into(z, z, parse_activation("folded_layer_norm_linear", activation));
  y.copy_(z.view(y.sizes()));
  return y;
}

Tensor folded_layer_norm_linear_backward_cpu(const Tensor& dy, const Tensor& x,
                                             const Tensor& folded_weight, const Tensor& weight_sum,
                                             const OptionalTensor& folded_bias, double eps,
                                             c10::string_view activation) {
  Tensor dx = folded_layer_norm_linear_backward_meta(dy, x, folded_weight, weight_sum, folded_bias,
                                                     eps, activation);
  if (dx.numel() == 0) return dx;
  const Activation act = parse_activation("folded_layer_norm_linear_backward", activation);
  const ShiftedRows rows(as_matrix(x), eps);
  Tensor dz = as_matrix(dy);
  if (needs_preact(act)) {
    const Tensor z = folded_preact(rows, folded_weight, folded_bias);
    dz = activation_backward(dz.to(z.scalar_type()), z, act).to(x.scalar_type());
  }
  const auto dtype = acc_dtype(x);
  Tensor drows = at::empty(rows.rows.sizes(), dz.options());
  matmul_into_cpu(drows, dz, folded_weight);
  const Tensor dnormalised = drows.to(dtype);
  const Tensor grad = std::get<0>(
      at::native_layer_norm_backward(dnormalised, rows.rows, {dx.size(-1)}, rows.mean, rows.rstd,
                                     std::nullopt, std::nullopt, {true, false, false}));
  dx.copy_(grad.view(dx.sizes()));
  return dx;
}

#ifdef TORCHWELD_CUDA
Folded fold_layer_norm_cuda(const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& ln_weight, const OptionalTensor& ln_bias) {
  auto [folded_weight, weight_sum, folded_bias] =
      fold_layer_norm_meta(weight, bias, ln_weight, ln_bias);
  if (weight.size(0) == 0) return {folded_weight, weight_sum, folded_bias};
  const OnDevice on(weight.device());
  const Vector in_bias(bias), in_ln_weight(ln_weight), in_ln_bias(ln_bias);
  launch_fold_layer_norm(
      {weight.const_data_ptr(), in_bias.data(), in_ln_weight.data(), in_ln_bias.data(),
       folded_weight.mutable_data_ptr(), mutable_data<float>(weight_sum),
       mutable_data<float>(folded_bias), weight.size(0), weight.size(1), weight.stride(0),
       weight.stride(1), dtype_of(weight)},
      current_stream());
  return {folded_weight, weight_sum, folded_bias};
}

Tensor folded_layer_norm_linear_cuda(const Tensor& x, const Tensor& folded_weight,
                                     const Tensor& weight_sum, const OptionalTensor& folded_bias,
                                     double eps, c10::string_view activation) {
  Tensor y =
      folded_layer_norm_linear_meta(x, folded_weight, weight_sum, folded_bias, eps, activation);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  norm_matmul_into(rows_of(y), {/*centred=*/true}, x, eps, folded_weight,
                   {folded_bias, parse_activation("folded_layer_norm_linear", activation)});
  return y;
}

Tensor folded_layer_norm_linear_backward_cuda(const Tensor& dy, const Tensor& x,
                                              const Tensor& folded_weight, const Tensor& weight_sum,
                                              const OptionalTensor& folded_bias, double eps,
                                              c10::string_view activation) {
  Tensor dx = folded_layer_norm_linear_backward_meta(dy, x, folded_weight, weight_sum, folded_bias,
                                                     eps, activation);
  if (dx.numel() == 0) return dx;
  const OnDevice on(x.device());
  const Activation act = parse_activation("folded_layer_norm_linear_backward", activation);
  const RowNorm norm = {/*centred=*/true};
  const int64_t rows = count_rows(x);
  const RowStatistics statistics = {empty_floats(rows, x), empty_floats(rows, x)};
  OptionalTensor z;
  if (needs_preact(act)) {
    const CallScope part("z");
    z = empty_matrix(rows, folded_weight.size(0), x);
    norm_matmul_into(*z, norm, x, eps, folded_weight, {folded_bias}, statistics);
  } else {
    row_statistics(norm, x, eps, statistics);
  }
  const Tensor nothing = empty_vector_grad(x, 0, /*wanted=*/false);
  const Tensor dz = activation_backward_into(nothing, dy, z, act);
  norm_matmuls_backward_into(dx, /*dweights=*/{}, /*dbiases=*/{}, nothing, nothing,
                             /*wants_x=*/true, norm, dz, x, folded_weight, statistics);
  return dx;
}
#endif

struct FoldedLayerNormLinearFunction : torch::autograd::Function<FoldedLayerNormLinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& folded_weight,
                        const Tensor& weight_sum, const OptionalTensor& folded_bias, double eps,
                        c10::string_view activation) {
    ctx->save_for_backward({x, folded_weight, weight_sum, or_undefined(folded_bias)});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["activation"] = activation;
    return call_folded_layer_norm_linear.below(x, folded_weight, weight_sum, folded_bias, eps,
                                               activation);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {call_folded_layer_norm_linear_backward(
                grads[0], saved[0], saved[1], saved[2], optional(saved[3]),
                ctx->saved_data["eps"].toDouble(), ctx->saved_data["activation"].toStringRef()),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

void check_frozen(const char* op, const Tensor& x, const Tensor& folded_weight,
                  const Tensor& weight_sum, const OptionalTensor& folded_bias, double eps,
                  c10::string_view activation) {
  const auto frozen = [&](const char* name, const OptionalTensor& t) {
    TW_CHECK(!any_needs_grad(t), op, name,
             " must be a tensor that needs no gradient, because the fold is for inference, but got "
             "requires_grad=True; train with layer_norm_linear, or use ",
             name, ".detach()");
  };
  check_no_tangent(op, x, folded_weight, weight_sum, folded_bias);
  frozen("folded_weight", folded_weight);
  frozen("weight_sum", weight_sum);
  frozen("folded_bias", folded_bias);
}

// Under autocast, weight_sum and folded_bias stay in fp32, because they are added to fp32 sums.
template <at::DeviceType device>
Tensor folded_layer_norm_linear_autocast(const Tensor& x, const Tensor& folded_weight,
                                         const Tensor& weight_sum,
                                         const OptionalTensor& folded_bias, double eps,
                                         c10::string_view activation) {
  const Autocast<device> cast;
  return call_folded_layer_norm_linear(cast(x), cast(folded_weight), weight_sum, folded_bias, eps,
                                       activation);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(
      m,
      "fold_layer_norm(Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
      "Tensor? ln_bias=None) -> (Tensor folded_weight, Tensor weight_sum, Tensor folded_bias)",
      TW_KERNELS(fold_layer_norm), no_gradient_function());
  define_op(
      m,
      "folded_layer_norm_linear(Tensor x, Tensor folded_weight, Tensor weight_sum, "
      "Tensor? folded_bias=None, *, float eps=1e-5, str activation=\"none\") -> Tensor",
      TW_KERNELS(folded_layer_norm_linear),
      recorded_by<FoldedLayerNormLinearFunction>(call_folded_layer_norm_linear, check_frozen));
  define_op(m,
            "folded_layer_norm_linear_backward(Tensor dy, Tensor x, Tensor folded_weight, "
            "Tensor weight_sum, Tensor? folded_bias=None, *, float eps=1e-5, "
            "str activation=\"none\") -> Tensor",
            TW_KERNELS(folded_layer_norm_linear_backward), no_gradient_function());
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("folded_layer_norm_linear", folded_layer_norm_linear_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("folded_layer_norm_linear", folded_layer_norm_linear_autocast<at::kCUDA>);
}

}  // namespace
}  // namespace torchweld::folded_linear_op
