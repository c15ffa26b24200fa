// layer_norm_linear:  y = activation(normed @ weight.T + bias),
//                     normed = layer_norm(x, (K,), ln_weight, ln_bias, eps)
//   x (..., K), weight (N, K), bias (N,), ln_weight and ln_bias (K,), y (..., N)
//
// layers/norm_linear_op.h defines the op. This file adds the CPU code of LayerNorm.
#include <ATen/TensorOperators.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>

#include "layers/norm_linear_op.h"

namespace torchweld::layer_norm_linear_op {
namespace {

struct LayerNorm {
  static constexpr const char *kOp = "layer_norm_linear", *kForward = "layer_norm_linear_forward",
                              *kBackward = "layer_norm_linear_backward";
  static constexpr std::array<const char*, 2> kVectors = {"ln_weight", "ln_bias"};
  static constexpr std::array<const char*, 2> kStatistics = {"mean", "rstd"};
  using Vectors = NormVectors<2>;
  using Statistics = NormStatistics<2>;

  // Converts a parameter of LayerNorm to the dtype of the statistics. ATen computes the statistics
  // of half-precision rows in fp32 only if the parameters are fp32.
  static OptionalTensor statistics_parameter(const OptionalTensor& t) {
    return is_given(t) ? OptionalTensor(t->to(acc_dtype(*t))) : std::nullopt;
  }
  static Tensor scale_parameter(const Tensor& x, const OptionalTensor& ln_weight) {
    const auto dtype = acc_dtype(x);
    return is_given(ln_weight) ? ln_weight->to(dtype)
                               : at::ones({x.size(-1)}, x.options().dtype(dtype));
  }

  static std::pair<Tensor, Statistics> normalise(const Tensor& x, const Vectors& vectors,
                                                 double eps) {
    const auto [rows, mean, rstd] = at::native_layer_norm(
        x, {x.size(-1)}, scale_parameter(x, vectors[0]), statistics_parameter(vectors[1]), eps);
    return {rows, {mean.squeeze(-1), rstd.squeeze(-1)}};
  }

  static Tensor normalise_again(const Tensor& x, const Vectors& vectors,
                                const Statistics& statistics) {
    Tensor rows = (x - statistics[0].unsqueeze(-1)).mul_(statistics[1].unsqueeze(-1));
    if (is_given(vectors[0])) rows.mul_(*vectors[0]);
    if (is_given(vectors[1])) rows.add_(*vectors[1]);
    return rows.to(x.scalar_type());
  }

  // Computes the gradients in the dtype of the statistics. With half-precision inputs, ATen would
  // sum the gradients of the parameters in half precision.
  static void backward(const std::array<Tensor, 3>& grads, bool wants_x, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics) {
    const std::array<bool, 3> wanted = {wants_x, grads[1].numel() > 0, grads[2].numel() > 0};
    const auto dtype = acc_dtype(x);
    const auto [dx, dln_weight, dln_bias] = at::native_layer_norm_backward(
        dnormalised.to(dtype), x.to(dtype), {x.size(-1)}, statistics[0].contiguous().unsqueeze(-1),
        statistics[1].contiguous().unsqueeze(-1), scale_parameter(x, vectors[0]),
        statistics_parameter(vectors[1]), wanted);
    if (wanted[0]) grads[0].copy_(dx);
    if (wanted[1]) grads[1].copy_(dln_weight);
    if (wanted[2]) grads[2].copy_(dln_bias);
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormLinear<LayerNorm>::define(
      m,
      "layer_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
      "Tensor? ln_bias=None, *, float eps=1e-5, str activation=\"none\") -> Tensor",
      "layer_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5, "
      "str activation=\"none\") -> (Tensor y, Tensor preact, Tensor mean, Tensor rstd)",
      "layer_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? ln_weight, "
      "Tensor? ln_bias, Tensor mean, Tensor rstd, Tensor? preact=None, *, "
      "str activation=\"none\", bool[5] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)");
}

}  // namespace
}  // namespace torchweld::layer_norm_linear_op
