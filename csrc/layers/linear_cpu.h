// CPU code of y = activation(x @ weight.T + bias) and its gradients. The code calls oneDNN where
// oneDNN is faster than torch's matmul.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <string_view>

#include "core/batch_invariance.h"
#include "core/index.h"
#include "core/linear_common.h"
#include "core/matmul_cpu.h"
#include "core/simd_cpu.h"
#include "core/sum.h"
#include "layers/activation.h"

namespace torchweld {

// Returns oneDNN's name of an activation, or nullptr if the activation must not be fused into
// oneDNN's linear layer.
// NOTE: relu and gelu are computed by torch after the linear layer. In oneDNN, relu(NaN) is 0 and
// gelu(inf) is NaN.
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

// An output of a product with x (M, K) is the sum of one or more chains of additions. Each chain
// adds up the products of one range of K. Returns the number of chains.
// NOTE: oneDNN adds up all of K in one chain, and the error of a chain grows with its length.
// Therefore a float32 product is split into short chains. A 16-bit product has one chain: rounding
// to 16 bits hides the error of a long chain, and each further chain would round the result again.
inline int64_t onednn_chains(const Tensor& x) {
  constexpr int64_t kMaxChain = 256;
  if (x.scalar_type() != at::kFloat) return 1;
  return std::max<int64_t>(1, divide_up(x.size(1), kMaxChain));
}

// Whether torch's float32 matmul is at least as fast as oneDNN's. Its time on an Intel CPU is 0.2
// to 0.9 of oneDNN's, and on an AMD CPU without AVX-512 0.7 to 1.0. On an AMD CPU with AVX-512,
// which MKL does not use there, its time is twice oneDNN's.
inline bool has_fast_mkl() {
#ifdef TW_SIMD_TARGETS
  static const bool is_intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return at::hasMKL() && (is_intel || simd_level() < 2);
#else
  return false;
#endif
}

// Returns activation(x (M, K) @ weight (N, K).T + bias) as a new tensor. Returns nullopt if the
// caller must use torch's matmul instead. One case is a torch without oneDNN. Another case is a
// small product, because the search for oneDNN's kernel takes longer than the product. The last
// case is a product that torch computes at least as fast: torch's bf16 matmul calls oneDNN itself,
// without an activation. If onednn_chains(x) is more than 1, the activation must be "none".
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
  const bool is_fused = std::string_view(activation) != "none";
  const bool is_faster = x.scalar_type() == at::kFloat
                             ? !has_fast_mkl()
                             : x.scalar_type() == at::kBFloat16 && supports_bfloat16 && is_fused;
  if (!op || !op_and_sum || !is_faster || !at::globalContext().userEnabledMkldnn()) {
    return std::nullopt;
  }
  const int64_t k = x.size(1), chains = onednn_chains(x);
  // If there are several chains, each chain costs a copy of a block of the weight and a call of
  // oneDNN. If x has few rows or the result is small, all chains together take longer than torch's
  // matmul.
  const bool pays = x.size(0) >= 32 && x.size(0) * weight.size(0) >= 1 << 14;
  if (chains > 1 && !pays) return std::nullopt;
  const bool rows = x.stride(1) == 1 && x.stride(0) >= k;
  const bool columns = x.stride(0) == 1 && x.stride(1) >= x.size(0);
  const Tensor a = rows || columns ? x : x.contiguous();
  // NOTE: if the rows of the weight are not adjacent in memory, oneDNN is 900 times slower.
  const auto without_gaps = [](const Tensor& t) {
    return t.t().is_contiguous() ? t : t.contiguous();
  };
  // NOTE: oneDNN ignores the stride of the bias and reads the bias as contiguous.
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

// Computes z (..., N) = activation(x @ weight.T + bias). z must be contiguous. The function may
// assign another tensor to z.
inline void linear_into(Tensor& z, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, Activation activation = Activation::kNone) {
  const Tensor rows = as_matrix(x);
  if (is_batch_invariant()) {
    invariant_linear_into(as_matrix(z), rows, weight, bias);
    activate_into(z, z, activation);
    return;
  }
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

// Computes `to` (M, N) = a @ b. The function may assign another tensor with the same strides to
// `to`. For dtypes other than float32 it calls torch, which uses oneDNN itself.
inline void matmul_into_cpu(Tensor& to, const Tensor& a, const Tensor& b) {
  if (is_batch_invariant()) {
    to.copy_(invariant_product(a, b));
    return;
  }
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

// Computes the gradients of linear_into from dz (rows, N) and x (rows, K). The functions in
// linear_common.h allocate the gradients. `wanted` says which of dx, dweight and dbias are
// computed. The other gradients stay unchanged.
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
