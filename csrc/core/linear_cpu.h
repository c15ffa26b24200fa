// CPU. y = activation(x @ weight.T + bias) and its gradients, through oneDNN where that is faster.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "core/linear_common.h"
#include "core/sum.h"

namespace torchweld {

// oneDNN's name of an activation that it applies to its sums, or nullptr.
// NOTE: its relu turns NaN into 0 and its gelu inf into NaN; those take torch's own pass.
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

// x (M, K) @ weight (N, K).T + bias as a new tensor, or nothing where torch's matmul is to run: for
// small sizes, which oneDNN takes longer to look up, and where torch doesn't offer it.
inline OptionalTensor onednn_linear(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const char* activation = "none") {
  constexpr int64_t kLeastProducts = 1 << 20;
  if (x.size(0) * x.size(1) * weight.size(0) < kLeastProducts) return std::nullopt;
  using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                        c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  static const bool serves_bfloat16 = [] {
    const auto asks =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asks && asks->typed<bool()>().call();
  }();
  const bool served =
      x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && serves_bfloat16);
  if (!op || !served || !at::globalContext().userEnabledMkldnn()) return std::nullopt;
  const auto dense = [](const Tensor& t) {
    const bool rows = t.stride(1) == 1 && t.stride(0) >= t.size(1);
    const bool columns = t.stride(0) == 1 && t.stride(1) >= t.size(0);
    return rows || columns ? t : t.contiguous();
  };
  return op->typed<Linear>().call(dense(x), dense(weight), bias, activation,
                                  c10::List<std::optional<at::Scalar>>(), "tanh");
}

// z (..., N) = activation(x @ weight.T + bias). z is contiguous, and may be replaced.
inline void linear_into(Tensor& z, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, Activation activation = Activation::kNone) {
  const char* fused = onednn_activation(activation);
  const Tensor rows = as_matrix(x);
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

// a @ b into `to` (M, N), which may be replaced by another tensor with its strides. torch runs
// 16-bit products on oneDNN itself.
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

// The gradients of linear_into into tensors of linear_common.h; those of size (0,) where nobody
// asked are left alone. dz (rows, N), x (rows, K).
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
