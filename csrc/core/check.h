// Argument checks. An error message is one sentence of the form "torchweld::<op>: <argument> must
// be <expected>, but got <got>; <fix>". All checks also work on symbolic sizes, so eager mode, the
// Meta kernels and torch.compile share them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#define TW_CHECK(condition, op, ...) \
  TORCH_CHECK(condition, "torchweld::", op, ": ", ::torchweld::message(__VA_ARGS__))

namespace torchweld {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kBool:
      return "bool";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kShort:
      return "int16";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

// Returns a part of an error message in a form that c10::str can write.
// NOTE: SymInt has an operator<<, but that operator is in torch's library and would write to a
// std::ostream of this library. If this library has a libstdc++ of its own (linked statically), the
// write crashes.
inline std::string printable(const c10::SymInt& size) {
  const auto value = size.maybe_as_int();
  return value ? std::to_string(*value) : size.toSymNode()->str();
}
template <typename T>
const T& printable(const T& part) {
  return part;
}

template <typename... Parts>
std::string message(const Parts&... parts) {
  return c10::str(printable(parts)...);
}

inline std::string shape_text(c10::SymIntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + printable(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string describe(const Tensor& t) {
  return dtype_name(t.scalar_type()) + " " + shape_text(t.sym_sizes()) + " on " + t.device().str();
}

// Returns the dtype of statistics and accumulators of an op on t: fp64 if t is fp64, else fp32.
inline at::ScalarType acc_dtype(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool is_given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  const auto dtype = t.scalar_type();
  const bool ok = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                  (dtype == at::kDouble && !t.is_cuda());
  TW_CHECK(ok, op, name, " must be float32, float16 or bfloat16 (float64 on CPU too), but got ",
           describe(t), "; use ", name, ".float()");
}

inline void check_min_dim(const char* op, const char* name, const Tensor& t, int64_t dims,
                          const char* layout) {
  TW_CHECK(t.dim() >= dims, op, name, " must be ", layout, ", but got ", describe(t));
}

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dims,
                      const char* layout) {
  TW_CHECK(t.dim() == dims, op, name, " must be ", layout, ", but got ", describe(t));
}

inline void check_device(const char* op, const char* name, const Tensor& t, const char* like_name,
                         const Tensor& like) {
  TW_CHECK(t.device() == like.device(), op, name, " must be on ", like.device().str(), " like ",
           like_name, ", but got ", describe(t), "; use ", name, ".to(", like_name, ".device)");
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, at::ScalarType dtype) {
  TW_CHECK(t.scalar_type() == dtype, op, name, " must be ", dtype_name(dtype), ", but got ",
           describe(t), "; use ", name, ".to(torch.", dtype_name(dtype), ")");
}

// Checks that t has the dtype and the device of `like`.
inline void check_like(const char* op, const char* name, const Tensor& t, const char* like_name,
                       const Tensor& like) {
  check_device(op, name, t, like_name, like);
  TW_CHECK(t.scalar_type() == like.scalar_type(), op, name, " must be ",
           dtype_name(like.scalar_type()), " like ", like_name, ", but got ", describe(t), "; use ",
           name, ".to(", like_name, ".dtype)");
}

// Checks that t has the shape `expected`. The error message contains `layout`, for example "(N,
// K)", and the expected sizes.
inline void check_shape(const char* op, const char* name, const Tensor& t,
                        c10::SymIntArrayRef expected, const char* layout) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  for (size_t i = 0; same && i < expected.size(); ++i) same = t.sym_size(i) == expected[i];
  TW_CHECK(same, op, name, " must be ", layout, " = ", shape_text(expected), ", but got ",
           describe(t));
}

// Returns the fix that an error message suggests for a weight of the wrong shape. If the weight is
// (K, N) instead of (N, K), the fix is .t(). GPT-2's Conv1D has weights (K, N).
inline std::string transpose_fix(const char* name, const Tensor& weight, const c10::SymInt& k) {
  const bool transposed = weight.sym_size(1) != k && weight.sym_size(0) == k;
  return transposed ? std::string("; use ") + name + ".t()" : "";
}

inline void check_finite(const char* op, const char* name, double value) {
  TW_CHECK(std::isfinite(value), op, name, " must be finite, but got ", value);
}

// Checks leftpad, which must be int32 (batch,) on the device of `like`. The function does not check
// the values, because it would have to wait for the GPU. If leftpad has another rank or is bool, it
// is probably an attention mask, so the error suggests leftpad_from_mask.
inline void check_leftpad(const char* op, const OptionalTensor& leftpad, const c10::SymInt& batch,
                          const char* like_name, const Tensor& like) {
  if (!is_given(leftpad)) return;
  const Tensor& pad = *leftpad;
  const bool ok = pad.scalar_type() == at::kInt && pad.device() == like.device() &&
                  pad.dim() == 1 && pad.sym_size(0) == batch;
  const bool is_mask = pad.dim() != 1 || pad.scalar_type() == at::kBool;
  TW_CHECK(ok, op, "leftpad must be int32 (", batch, ",) on ", like.device().str(), ", but got ",
           describe(pad), "; use ",
           is_mask ? std::string("torchweld.leftpad_from_mask(attention_mask)")
                   : std::string("leftpad.to(") + like_name + ".device, torch.int32)");
}

// Returns the sizes of x, with the last size replaced by `last`.
inline std::vector<c10::SymInt> with_last(const Tensor& x, const c10::SymInt& last) {
  std::vector<c10::SymInt> sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = last;
  return sizes;
}

// Returns the sizes of x without the last size.
inline std::vector<c10::SymInt> without_last(const Tensor& x) {
  return {x.sym_sizes().begin(), x.sym_sizes().end() - 1};
}

}  // namespace torchweld
