// The norms that ops apply to rows before a matmul: their arguments, and the CPU code that computes
// the normalised rows, the statistics and the gradients. LayerNorm has the vectors (scale, shift)
// and the statistics (mean, rstd), in this order. RMSNorm has only scale and rstd, and multiplies
// by scale + weight_offset.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>

#include "core/linear_common.h"
#include "norm/rows.h"

namespace torchweld {

// The vectors (K,) and the statistics (...) of a norm.
template <size_t kCount>
using NormVectors = std::array<OptionalTensor, kCount>;
template <size_t kCount>
using NormStatistics = std::array<Tensor, kCount>;

// RMSNorm calls the code of rms_norm (norm/rows.h), which needs fewer passes than ATen.
struct RmsNormCpu {
  static constexpr std::array<const char*, 1> kVectors = {"norm_weight"};
  static constexpr std::array<const char*, 1> kStatistics = {"rstd"};
  static constexpr bool kHasOffset = true;
  using Vectors = NormVectors<1>;
  using Statistics = NormStatistics<1>;

  static std::pair<Tensor, Statistics> normalise(const Tensor& x, const Vectors& vectors,
                                                 double eps, double weight_offset) {
    const Tensor rows = at::empty(x.sizes(), x.options());
    const Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(acc_dtype(x)));
    norm_forward_cpu(inputs(x, vectors, eps, weight_offset, {}), {rows, {}, {}, rstd});
    return {rows, {rstd}};
  }

  static Tensor normalise_again(const Tensor& x, const Vectors& vectors,
                                const Statistics& statistics, double weight_offset) {
    const Tensor rows = at::empty(x.sizes(), x.options());
    norm_forward_cpu(inputs(x, vectors, /*eps=*/0, weight_offset, statistics[0]),
                     {rows, {}, {}, {}});
    return rows;
  }

  static void backward(const std::array<Tensor, 2>& grads, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics,
                       double weight_offset) {
    norm_backward_cpu({/*centred=*/false,
                       dnormalised,
                       x,
                       vectors[0],
                       {},
                       statistics[0],
                       std::nullopt,
                       weight_offset},
                      {grads[0], grads[1], empty_vector_grad(x, 0, /*wanted=*/false)});
  }

 private:
  static NormInputs inputs(const Tensor& x, const Vectors& vectors, double eps,
                           double weight_offset, const Tensor& saved_rstd) {
    return {/*centred=*/false, x,   std::nullopt,  vectors[0],
            std::nullopt,      eps, weight_offset, saved_rstd};
  }
};

struct LayerNormCpu {
  static constexpr std::array<const char*, 2> kVectors = {"ln_weight", "ln_bias"};
  static constexpr std::array<const char*, 2> kStatistics = {"mean", "rstd"};
  static constexpr bool kHasOffset = false;
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
                                                 double eps, double) {
    const auto [rows, mean, rstd] = at::native_layer_norm(
        x, {x.size(-1)}, scale_parameter(x, vectors[0]), statistics_parameter(vectors[1]), eps);
    return {rows, {mean.squeeze(-1), rstd.squeeze(-1)}};
  }

  static Tensor normalise_again(const Tensor& x, const Vectors& vectors,
                                const Statistics& statistics, double) {
    Tensor rows = (x - statistics[0].unsqueeze(-1)).mul_(statistics[1].unsqueeze(-1));
    if (is_given(vectors[0])) rows.mul_(*vectors[0]);
    if (is_given(vectors[1])) rows.add_(*vectors[1]);
    return rows.to(x.scalar_type());
  }

  // Computes the gradients in the dtype of the statistics. With half-precision inputs, ATen would
  // sum the gradients of the parameters in half precision.
  static void backward(const std::array<Tensor, 3>& grads, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics,
                       double) {
    const std::array<bool, 3> wanted = {grads[0].numel() > 0, grads[1].numel() > 0,
                                        grads[2].numel() > 0};
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

}  // namespace torchweld
