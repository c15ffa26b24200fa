// The norms of the ops that normalise rows in front of matmuls: their arguments, and the CPU code
// of the normalised rows, of the statistics and of the gradients. LayerNorm has the vectors scale
// and shift and the statistics mean and rstd, in these orders. RMSNorm has only scale and rstd, and
// multiplies by scale + weight_offset.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>

#include "layers/linear_common.h"

namespace torchweld {

// The vectors (K,) and the statistics (...) of a norm.
template <size_t kCount>
using NormVectors = std::array<OptionalTensor, kCount>;
template <size_t kCount>
using NormStatistics = std::array<Tensor, kCount>;

struct RmsNormCpu {
  static constexpr std::array<const char*, 1> kVectors = {"norm_weight"};
  static constexpr std::array<const char*, 1> kStatistics = {"rstd"};
  static constexpr bool kHasOffset = true;
  using Vectors = NormVectors<1>;
  using Statistics = NormStatistics<1>;

  // Returns x * rstd in the dtype of the statistics. The caller must multiply the result by the
  // scale.
  static Tensor scale_rows(const Tensor& x, const Tensor& rstd) {
    return x.to(rstd.scalar_type()) * rstd.unsqueeze(-1);
  }

  // Returns norm_weight + weight_offset. A weight without an offset keeps its dtype.
  static Tensor scale_of(const Tensor& norm_weight, double weight_offset) {
    return weight_offset == 0 ? norm_weight
                              : norm_weight.to(acc_dtype(norm_weight)) + weight_offset;
  }

  static std::pair<Tensor, Statistics> normalise(const Tensor& x, const Vectors& vectors,
                                                 double eps, double weight_offset) {
    const Tensor norm =
        at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/false, acc_dtype(x));
    const Statistics statistics = {norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()};
    return {normalise_again(x, vectors, statistics, weight_offset), statistics};
  }

  static Tensor normalise_again(const Tensor& x, const Vectors& vectors,
                                const Statistics& statistics, double weight_offset) {
    Tensor rows = scale_rows(x, statistics[0]);
    if (is_given(vectors[0])) rows.mul_(scale_of(*vectors[0], weight_offset));
    return rows.to(x.scalar_type());
  }

  static void backward(const std::array<Tensor, 2>& grads, bool wants_x, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics,
                       double weight_offset) {
    const Tensor& rstd = statistics[0];
    const Tensor scaled = scale_rows(x, rstd);
    Tensor grad = dnormalised.to(rstd.scalar_type());
    if (grads[1].numel() > 0) grads[1].copy_(as_matrix(grad * scaled).sum(0));
    if (!wants_x) return;
    if (is_given(vectors[0])) grad = grad * scale_of(*vectors[0], weight_offset);
    const Tensor projection = (grad * scaled).mean(-1, /*keepdim=*/true);
    grads[0].copy_((grad - scaled * projection).mul_(rstd.unsqueeze(-1)));
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
  static void backward(const std::array<Tensor, 3>& grads, bool wants_x, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics,
                       double) {
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

}  // namespace torchweld
