// rms_norm_linear computes y = activation((x * rstd * norm_weight) @ weight.T + bias) with rstd = 1
// / sqrt(mean(x * x) + eps).
//   x (..., K), weight (N, K), bias (N,), norm_weight (K,), y (..., N)
//
// layers/norm_linear_op.h defines the op. This file adds RMSNorm on the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>

#include "layers/norm_linear_op.h"

namespace torchweld::rms_norm_linear_op {
namespace {

struct RmsNorm {
  static constexpr const char *kOp = "rms_norm_linear", *kForward = "rms_norm_linear_forward",
                              *kBackward = "rms_norm_linear_backward";
  static constexpr std::array<const char*, 1> kVectors = {"norm_weight"};
  static constexpr std::array<const char*, 1> kStatistics = {"rstd"};
  using Vectors = NormVectors<1>;
  using Statistics = NormStatistics<1>;

  // Returns x * rstd in the dtype of the statistics. The caller must multiply the result by
  // norm_weight.
  static Tensor scale_rows(const Tensor& x, const Tensor& rstd) {
    return x.to(rstd.scalar_type()) * rstd.unsqueeze(-1);
  }

  static std::pair<Tensor, Statistics> normalise(const Tensor& x, const Vectors& vectors,
                                                 double eps) {
    const Tensor norm =
        at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/false, acc_dtype(x));
    const Statistics statistics = {norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()};
    return {normalise_again(x, vectors, statistics), statistics};
  }

  static Tensor normalise_again(const Tensor& x, const Vectors& vectors,
                                const Statistics& statistics) {
    Tensor rows = scale_rows(x, statistics[0]);
    if (is_given(vectors[0])) rows.mul_(*vectors[0]);
    return rows.to(x.scalar_type());
  }

  static void backward(const std::array<Tensor, 2>& grads, bool wants_x, const Tensor& dnormalised,
                       const Tensor& x, const Vectors& vectors, const Statistics& statistics) {
    const Tensor& rstd = statistics[0];
    const Tensor scaled = scale_rows(x, rstd);
    Tensor grad = dnormalised.to(rstd.scalar_type());
    if (grads[1].numel() > 0) grads[1].copy_(as_matrix(grad * scaled).sum(0));
    if (!wants_x) return;
    if (is_given(vectors[0])) grad = grad * *vectors[0];
    const Tensor projection = (grad * scaled).mean(-1, /*keepdim=*/true);
    grads[0].copy_((grad - scaled * projection).mul_(rstd.unsqueeze(-1)));
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  NormLinear<RmsNorm>::define(
      m,
      "rms_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, *, "
      "float eps=1e-6, str activation=\"none\") -> Tensor",
      "rms_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
      "Tensor? norm_weight=None, *, float eps=1e-6, str activation=\"none\") -> "
      "(Tensor y, Tensor preact, Tensor rstd)",
      "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? norm_weight, "
      "Tensor rstd, Tensor? preact=None, *, str activation=\"none\", bool[4] output_mask) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm_weight)");
}

}  // namespace
}  // namespace torchweld::rms_norm_linear_op
