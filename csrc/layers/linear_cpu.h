// CPU code of y = activation(x @ weight.T + bias) and its gradients. Uses oneDNN where that is
// faster.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "core/index.h"
#include "layers/linear_common.h"
#include "puzzles/sum.h"

namespace torchweld {

// oneDNN's name for an activation that it can fuse into a linear layer, or nullptr.
// NOTE: relu and gelu are not fused, and torch computes them separately, because oneDNN's relu of
// NaN is 0 and its gelu of inf is NaN.
inline const char* onednn_activation(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kGeluTanh:
      return "gelu";
    case Activation::kSilu:
      return "swish";
    default:
      return nullptr;
  }
}

// How many chains of additions a product with x (M, K) is split into.
// NOTE: oneDNN adds up all of K in one chain, whose error grows with K, so chains of float32 sums
// are kept short. 16-bit results don't show that error, and must not be rounded between two chains.
inline int64_t onednn_chains(const Tensor& x) {
  constexpr int64_t kMaxChain = 256;
  if (x.scalar_type() != at::kFloat) return 1;
  return std::max<int64_t>(1, divide_up(x.size(1), kMaxChain));
}

// Returns x (M, K) @ weight (N, K).T + bias as a new tensor, or nullopt if torch's matmul must run
// instead: for small sizes, where looking up oneDNN's kernel takes longer than the product, and if
// torch was built without oneDNN. An activation other than "none" requires that onednn_chains(x) is
// 1.
inline OptionalTensor onednn_linear(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const char* activation = "none") {
  constexpr int64_t kMinProducts = 1 << 20;
  if (x.size(0) * x.size(1) * weight.size(0) < kMinProducts) return std::nullopt;
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                        Scalars, std::optional<c10::string_view>);
  using LinearAndSum =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view);
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  static const auto op_and_sum =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", "binary"});
  static const bool supports_bfloat16 = [] {
    const auto asks =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asks && asks->typed<bool()>().call();
  }();
  const bool supports_dtype =
      x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && supports_bfloat16);
  if (!op || !op_and_sum || !supports_dtype || !at::globalContext().userEnabledMkldnn()) {
    return std::nullopt;
  }
  const int64_t k = x.size(1), chains = onednn_chains(x);
  // With several chains, each chain copies its block of the weight and makes a call. For few rows
  // or results this costs more than it saves.
  const bool pays = x.size(0) >= 32 && x.size(0) * weight.size(0) >= 1 << 14;
  if (chains > 1 && !pays) return std::nullopt;
  const bool rows = x.stride(1) == 1 && x.stride(0) >= k;
  const bool columns = x.stride(0) == 1 && x.stride(1) >= x.size(0);
  const Tensor a = rows || columns ? x : x.contiguous();
  // NOTE: if the rows of a weight have gaps between them, oneDNN is 900 times slower.
  const auto without_gaps = [](const Tensor& t) {
    return t.t().is_contiguous() ? t : t.contiguous();
  };
  // NOTE: oneDNN reads the bias as contiguous, whatever its strides are.
  const OptionalTensor values = is_given(bias) ? OptionalTensor(bias->contiguous()) : std::nullopt;
  Tensor y;
  for (int64_t i = 0; i < chains; ++i) {
    const int64_t first = i * k / chains, size = (i + 1) * k / chains - first;
    const Tensor block_a = a.narrow(1, first, size);
    const Tensor block_b = without_gaps(weight.narrow(1, first, size));
    y = i == 0 ? op->typed<Linear>().call(block_a, block_b, values, activation, Scalars(), "tanh")
               : op_and_sum->typed<LinearAndSum>().call(block_a, y, block_b, std::nullopt, "add");
  }
  return y;
}

// Computes z (..., N) = activation(x @ weight.T + bias). z is contiguous; the function may replace
// it by another tensor.
inline void linear_into(Tensor& z, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, Activation activation = Activation::kNone) {
  const Tensor rows = as_matrix(x);
  const char* fused = onednn_chains(rows) == 1 ? onednn_activation(activation) : nullptr;
  if (const OptionalTensor y = onednn_linear(rows, weight, bias, fused ? fused : "none")) {
    z = y->view(z.sizes());
    if (!fused) activate_into(z, z, activation);
    return;
  }
  Tensor out = as_matrix(z);
  if (is_given(bias)) {
    at::addmm_out(out, *bias, rows, weight.t());
  } else {
    at::mm_out(out, rows, weight.t());
  }
  activate_into(z, z, activation);
}

// Computes `to` (M, N) = a @ b. The function may replace `to` by another tensor with the same
// strides. 16-bit products need no special case, because torch runs them on oneDNN.
inline void matmul_into_cpu(Tensor& to, const Tensor& a, const Tensor& b) {
  if (to.scalar_type() != at::kFloat) {
    at::mm_out(to, a, b);
    return;
  }
  if (to.is_contiguous()) {
    if (const OptionalTensor y = onednn_linear(a, b.t(), std::nullopt)) {
      to = *y;
      return;
    }
  } else if (to.t().is_contiguous()) {
    if (const OptionalTensor y = onednn_linear(b.t(), a, std::nullopt)) {
      to = y->t();
      return;
    }
  }
  at::mm_out(to, a, b);
}

// Computes the gradients of linear_into from dz (rows, N) and x (rows, K). The results are tensors
// from the functions in linear_common.h; `wanted` says which of dx, dweight and dbias to compute,
// and the others stay unchanged.
inline void linear_backward_into(Tensor& dx, Tensor& dweight, Tensor& dbias,
                                 const std::array<bool, 3>& wanted, const Tensor& dz,
                                 const Tensor& x, const Tensor& weight) {
  if (wanted[0]) {
    Tensor out = as_matrix(dx);
    matmul_into_cpu(out, dz, weight);
    dx = out.view(dx.sizes());
  }
  if (wanted[1]) matmul_into_cpu(dweight, dz.t(), x);
  if (wanted[2]) sum_into(dbias, dz, 0);
}

}  // namespace torchweld
