// Argument checks and allocations for the ops with one matmul. The shapes are x (..., K), weight
// (N, K), bias (N,) and y (..., N).
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "core/check.h"

namespace torchweld {

// Returns the number of rows of a tensor (..., n): the product of all sizes but the last. n may be
// 0.
inline int64_t count_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

// Returns a tensor (..., n) as a matrix (rows, n), without a copy if the strides allow it.
inline Tensor as_matrix(const Tensor& t) { return t.reshape({count_rows(t), t.size(-1)}); }

inline Tensor empty_result(const Tensor& like, c10::SymIntArrayRef sizes) {
  return at::empty_symint(sizes, like.options());
}

// Allocates the gradient of x as a contiguous tensor. Returns a tensor of size (0,) if the gradient
// is not requested.
inline Tensor empty_input_grad(const Tensor& x, bool wanted) {
  return wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
}

// Allocates the gradient of a weight. Returns a tensor of size (0,) if the gradient is not
// requested. If the weight is dense, the gradient has the strides of the weight. If the weight is
// the transpose of a parameter, the gradient thus has the memory layout of that parameter.
inline Tensor empty_weight_grad(const Tensor& weight, bool wanted) {
  return wanted ? at::empty_like(weight) : at::empty({0}, weight.options());
}

inline Tensor empty_vector_grad(const Tensor& like, const c10::SymInt& size, bool wanted) {
  return at::empty_symint({wanted ? size : c10::SymInt(0)}, like.options());
}

// Checks t, a statistic of the rows of x. The forward op has saved t. Error messages call x
// `x_name`.
inline void check_statistic(const char* op, const char* name, const Tensor& t, const Tensor& x,
                            const char* x_name = "x") {
  check_device(op, name, t, x_name, x);
  check_dtype(op, name, t, acc_dtype(x));
  check_shape(op, name, t, without_last(x), "(...,)");
}

inline void check_eps(const char* op, double eps) {
  TW_CHECK(std::isfinite(eps) && eps >= 0, op, "eps must be finite and at least 0, but got ", eps);
}

// Checks the number that an RMS op adds to the norm's weight. Error messages call the weight
// `weight_name`.
inline void check_weight_offset(const char* op, const char* weight_name,
                                const OptionalTensor& weight, double weight_offset) {
  check_finite(op, "weight_offset", weight_offset);
  TW_CHECK(is_given(weight) || weight_offset == 0, op, "weight_offset must be 0 without a ",
           weight_name, ", but got ", weight_offset);
}

// Checks an optional vector. It must have `size` values and the dtype and device of x. Error
// messages call x `x_name`.
inline void check_vector(const char* op, const char* name, const OptionalTensor& t,
                         const c10::SymInt& size, const char* layout, const Tensor& x,
                         const char* x_name = "x") {
  if (!is_given(t)) return;
  check_like(op, name, *t, x_name, x);
  check_shape(op, name, *t, {size}, layout);
}

// Checks x, weight and bias, and returns the sizes of y.
inline std::vector<c10::SymInt> check_linear(const char* op, const Tensor& x,
                                             const char* weight_name, const Tensor& weight,
                                             const OptionalTensor& bias) {
  check_floating(op, "x", x);
  check_min_dim(op, "x", x, 1, "(..., K)");
  check_like(op, weight_name, weight, "x", x);
  check_dim(op, weight_name, weight, 2, "(N, K)");
  const auto k = x.sym_size(-1);
  TW_CHECK(weight.sym_size(1) == k, op, weight_name, " must be (N, K) with K = ", k, ", but got ",
           describe(weight), transpose_fix(weight_name, weight, k));
  check_vector(op, "bias", bias, weight.sym_size(0), "(N,)", x);
  return with_last(x, weight.sym_size(0));
}

// Checks dy (..., N). `sizes` is the shape of y, which dy must have.
inline void check_dy(const char* op, const Tensor& dy, c10::SymIntArrayRef sizes, const Tensor& x) {
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, sizes, "(..., N)");
}

}  // namespace torchweld
