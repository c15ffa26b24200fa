// The state of the mode is a dispatch key that the thread includes. torch copies such keys to the
// threads of a backward. They also let the mode replace the kernels of torch's own matmuls and
// means, which choose the order of their sums by the number of rows.
// NOTE: torch has no dispatch key for users. It reserves this one for modes in its own tests.
#include "core/batch_invariance.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstdlib>
#include <string_view>

#include "core/dispatch.h"

namespace torchweld {
namespace {

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

bool is_on_by_default() {
  static const bool on = [] {
    const char* value = std::getenv("TORCHWELD_BATCH_INVARIANT");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return on;
}

// Whether this library has kernels for a matmul of the tensors.
bool serves(std::initializer_list<Tensor> tensors) {
  const Tensor& first = *tensors.begin();
  if (!first.is_cpu() && !first.is_cuda()) return false;
  const auto autocast =
      first.is_cpu() ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA;
  const bool casts = !c10::impl::tls_is_dispatch_key_excluded(autocast);
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& t) {
    const auto dtype = t.scalar_type();
    const bool has_kernel = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                            (dtype == at::kDouble && t.is_cpu());
    return has_kernel && t.layout() == at::kStrided && !t.is_nested() &&
           t.device() == first.device() && (casts || dtype == first.scalar_type());
  });
}

Tensor torchweld_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view);
  static const auto op = find_op<Linear>("linear");
  return op.call(x, weight, bias, "none");
}

using c10::impl::ExcludeDispatchKeyGuard;

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const bool vector_bias = !is_given(bias) || bias->dim() == 1;
  if (weight.dim() == 2 && vector_bias && serves({x, weight, is_given(bias) ? *bias : x})) {
    return torchweld_linear(x, weight, bias);
  }
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::linear(x, weight, bias);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  if (serves({a, b})) return torchweld_linear(a, b.t(), std::nullopt);
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::mm(a, b);
}

Tensor mv(const Tensor& a, const Tensor& vector) {
  if (serves({a, vector})) return torchweld::mm(a, vector.unsqueeze(1)).squeeze(1);
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::mv(a, vector);
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("bmm");
  if (serves({a, b})) return op.call(a, b);
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::bmm(a, b);
}

// Returns beta * to + alpha * product. As in torch, beta = 0 ignores NaN in `to`.
Tensor scaled_sum(const Tensor& to, const Tensor& product, const at::Scalar& beta,
                  const at::Scalar& alpha) {
  if (beta.equal(0)) return product.mul(alpha);
  return at::add(beta.equal(1) ? to : to.mul(beta), product, alpha);
}

Tensor addmm(const Tensor& to, const Tensor& a, const Tensor& b, const at::Scalar& beta,
             const at::Scalar& alpha) {
  if (serves({a, b, to})) {
    const bool is_bias = beta.equal(1) && alpha.equal(1) && to.dim() == 1;
    if (is_bias) return torchweld_linear(a, b.t(), to);
    return scaled_sum(to, torchweld_linear(a, b.t(), std::nullopt), beta, alpha);
  }
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::addmm(to, a, b, beta, alpha);
}

Tensor baddbmm(const Tensor& to, const Tensor& a, const Tensor& b, const at::Scalar& beta,
               const at::Scalar& alpha) {
  if (serves({a, b, to})) return scaled_sum(to, torchweld::bmm(a, b), beta, alpha);
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::baddbmm(to, a, b, beta, alpha);
}

// A function of torch that stores its result in `out`, and one that overwrites its first argument.
template <auto function, typename... Args>
Tensor& store_in(Args... args, Tensor& out) {
  const auto dtype = std::get<0>(std::tie(args...)).scalar_type();
  TORCH_CHECK(out.scalar_type() == dtype, "Expected out tensor to have dtype ", dtype, ", but got ",
              out.scalar_type(), " instead");
  const bool records = !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradCPU);
  TORCH_CHECK(!records || !any_needs_grad(args..., out),
              "functions with out=... arguments don't support automatic differentiation, but one "
              "of the arguments requires grad.");
  const Tensor result = function(args...);
  if (out.sizes() != result.sizes()) out.resize_(result.sizes());
  return out.copy_(result);
}
template <auto function>
Tensor& add_to(Tensor& to, const Tensor& a, const Tensor& b, const at::Scalar& beta,
               const at::Scalar& alpha) {
  return to.copy_(function(to, a, b, beta, alpha));
}

Tensor mean(const Tensor& x, at::OptionalIntArrayRef dims, bool keepdim,
            std::optional<at::ScalarType> dtype) {
  const bool of_rows = dims && dims->size() == 1 && x.dim() > 0 &&
                       ((*dims)[0] == -1 || (*dims)[0] == x.dim() - 1) && x.size(-1) > 0;
  if (of_rows && serves({x})) {
    static const auto row_sum = find_op<Tensor(const Tensor&)>("row_sum");
    const auto to = dtype.value_or(x.scalar_type());
    const auto acc = to == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor sum = row_sum.call(x.to(acc)).div(x.size(-1)).to(to);
    return keepdim ? sum.unsqueeze(-1) : sum;
  }
  const ExcludeDispatchKeyGuard guard(kMode);
  return at::mean(x, dims, keepdim, dtype);
}

}  // namespace

bool is_batch_invariant() {
  thread_local const bool started = [] {
    if (is_on_by_default()) c10::impl::tls_set_dispatch_key_included(kMode, true);
    return true;
  }();
  (void)started;
  return c10::impl::tls_is_dispatch_key_included(kMode);
}

bool set_batch_invariant(bool on) {
  const bool before = is_batch_invariant();
  c10::impl::tls_set_dispatch_key_included(kMode, on);
  return before;
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("_is_batch_invariant() -> bool", is_batch_invariant);
  m.def("_set_batch_invariant(bool on) -> bool", set_batch_invariant);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("linear", linear);
  m.impl("mm", mm);
  m.impl("mv", mv);
  m.impl("bmm", bmm);
  m.impl("addmm", addmm);
  m.impl("baddbmm", baddbmm);
  m.impl("addmm_", add_to<addmm>);
  m.impl("baddbmm_", add_to<baddbmm>);
  m.impl("mm.out", store_in<mm, const Tensor&, const Tensor&>);
  m.impl("bmm.out", store_in<bmm, const Tensor&, const Tensor&>);
  m.impl("addmm.out", store_in<addmm, const Tensor&, const Tensor&, const Tensor&,
                               const at::Scalar&, const at::Scalar&>);
  m.impl("baddbmm.out", store_in<baddbmm, const Tensor&, const Tensor&, const Tensor&,
                                 const at::Scalar&, const at::Scalar&>);
  m.impl("mean.dim", mean);
}

}  // namespace torchweld
