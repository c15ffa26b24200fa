// Argument checks of the ops on 4-bit weights.
#pragma once

#include <ATen/core/grad_mode.h>

#include "core/check.h"
#include "int4/layout.h"

namespace torchweld {

inline constexpr const char* kInt4Rule =
    "; a weight (N, K) has qweight (N, K/8), scale (N, K/group) and zero (N, ceil(K/group/8)), "
    "where group is a multiple of 8 that divides K";

inline c10::SymInt ceil_div(const c10::SymInt& a, int64_t b) { return (a + (b - 1)) / b; }

inline void check_words(const char* op, const char* name, const Tensor& t, int64_t dims,
                        const char* layout, const char* like_name, const Tensor& like) {
  check_device(op, name, t, like_name, like);
  check_dtype(op, name, t, at::kInt);
  check_dim(op, name, t, dims, layout);
}

// Whether K columns can be divided into `groups` equal groups, with a group size that is a multiple
// of 8. If K is 0, `groups` must be 0.
inline bool int4_groups_fit(const c10::SymInt& k, const c10::SymInt& groups) {
  if (k == 0) return groups == 0;
  return groups > 0 && k % (groups * kInt4Unit) == 0;
}

// Checks that the shapes of qweight, scale and zero fit together. Checks that scale has the dtype
// of `like` and that all tensors are on the device of `like`.
inline void check_int4_weight(const char* op, const Tensor& qweight, const Tensor& scale,
                              const Tensor& zero, const char* like_name, const Tensor& like) {
  check_words(op, "qweight", qweight, 2, "(N, K/8)", like_name, like);
  check_like(op, "scale", scale, like_name, like);
  check_dim(op, "scale", scale, 2, "(N, K/group)");
  check_words(op, "zero", zero, 2, "(N, ceil(K/group/8))", like_name, like);
  const c10::SymInt n = qweight.sym_size(0), k = qweight.sym_size(1) * kInt4Unit;
  const c10::SymInt groups = scale.sym_size(1);
  TW_CHECK(scale.sym_size(0) == n && int4_groups_fit(k, groups), op,
           "scale must be (N, K/group) with N = ", n, " and K = ", k, ", but got scale ",
           shape_text(scale.sym_sizes()), " beside qweight ", shape_text(qweight.sym_sizes()),
           " and zero ", shape_text(zero.sym_sizes()), kInt4Rule);
  const c10::SymInt words = ceil_div(groups, kInt4Unit);
  TW_CHECK(zero.sym_size(0) == n && zero.sym_size(1) == words, op,
           "zero must be (N, ceil(K/group/8)) = ", shape_text({n, words}), ", but got zero ",
           shape_text(zero.sym_sizes()), " beside qweight ", shape_text(qweight.sym_sizes()),
           " and scale ", shape_text(scale.sym_sizes()), kInt4Rule);
}

// Raises an error if `t` requires a gradient. `t` is a scale or a bias. Only x can have a gradient.
inline void check_int4_frozen(const char* op, const char* name, const OptionalTensor& t) {
  const bool wanted = at::GradMode::is_enabled() && is_given(t) && t->requires_grad();
  TW_CHECK(
      !wanted, op, name,
      " must be a tensor that needs no gradient, because a quantised weight is frozen, but got "
      "requires_grad=True; only x has a gradient, use ",
      name, ".detach()");
}

// The sizes of a weight in the portable layout.
inline Int4Shape int4_shape(const Tensor& qweight, const Tensor& scale) {
  return {qweight.size(0), qweight.size(1) * kInt4Unit, scale.size(1)};
}

}  // namespace torchweld
