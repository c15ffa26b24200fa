// The options, the checks and the per-row vectors of the loss ops, for the CPU and CUDA. An op
// receives the logits (..., N) or computes them as linear(x, weight, bias). The shapes are
// x (..., K), weight (N, K), bias (N,) and target (...).
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>

#include "core/index.h"
#include "core/linear_common.h"
#include "losses/rows.h"

namespace torchweld {

enum class Reduction { kNone, kMean, kSum };

inline Reduction parse_reduction(const char* op, c10::string_view name) {
  if (name == "none") return Reduction::kNone;
  if (name == "mean") return Reduction::kMean;
  TW_CHECK(name == "sum", op, "reduction must be 'none', 'mean' or 'sum', but got '",
           std::string(name), "'");
  return Reduction::kSum;
}

struct LossOptions {
  Reduction reduction = Reduction::kNone;
  std::optional<int64_t> ignore_index = std::nullopt;
  double label_smoothing = 0;
  std::optional<double> softcap = std::nullopt;
  double z_loss = 0;
  int64_t shift = 0;
  double temperature = 1;
  bool mean = false;  // whether the op returns mean(z) of each row, or receives its gradient

  bool needs_mean() const { return mean || label_smoothing != 0; }
  template <typename T>
  LogitScale<T> logit_scale() const {
    return {static_cast<T>(softcap.value_or(0)), static_cast<T>(temperature)};
  }
  template <typename T>
  CrossEntropyTerms<T> terms() const {
    return {static_cast<T>(label_smoothing), static_cast<T>(z_loss)};
  }
};

inline void check_loss_options(const char* op, const LossOptions& options) {
  TW_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
           "label_smoothing must be from 0 to 1, but got ", options.label_smoothing);
  check_finite(op, "z_loss", options.z_loss);
  TW_CHECK(options.shift == 0 || options.shift == 1, op, "shift must be 0 or 1, but got ",
           options.shift);
  if (options.softcap) {
    TW_CHECK(std::isfinite(*options.softcap) && *options.softcap > 0, op,
             "softcap must be finite and above 0, or None, but got ", *options.softcap);
  }
  TW_CHECK(std::isfinite(options.temperature) && options.temperature > 0, op,
           "temperature must be finite and above 0, but got ", options.temperature);
}

// Checks that the loss is a scalar. Ops that compute the gradients in the forward need a scalar
// loss: their backward multiplies the gradients by dloss, which must be a single number.
inline void check_is_reduced(const char* op, const LossOptions& options) {
  TW_CHECK(options.reduction != Reduction::kNone, op,
           "reduction must be 'mean' or 'sum', but got 'none'");
}

// Parses and checks the options of a cross entropy.
inline LossOptions cross_entropy_options(const char* op, c10::string_view reduction,
                                         int64_t ignore_index, double label_smoothing,
                                         std::optional<double> softcap, double z_loss,
                                         int64_t shift, double temperature) {
  const LossOptions options = {parse_reduction(op, reduction),
                               ignore_index,
                               label_smoothing,
                               softcap,
                               z_loss,
                               shift,
                               temperature};
  check_loss_options(op, options);
  return options;
}

// Checks `target` against x. x is the argument `x` or the argument `logits` of the op, `name` is
// the name of this argument, and `size` is the name of its last dim. Returns the shape of a
// per-token result.
inline std::vector<c10::SymInt> check_target(const char* op, const Tensor& target, const char* name,
                                             const Tensor& x, const char* size, int64_t shift) {
  check_device(op, "target", target, name, x);
  TW_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, op,
           "target must be int64 or int32, but got ", describe(target), "; use target.long()");
  const std::string leading = std::string("the leading dims of ") + name;
  check_shape(op, "target", target, without_last(x), leading.c_str());
  std::vector<c10::SymInt> sizes = without_last(x);
  if (shift == 0) return sizes;
  TW_CHECK(!sizes.empty() && sizes.back() >= 1, op, name, " must be (..., S, ", size,
           ") with S at least 1 for shift=1, but got ", describe(x));
  sizes.back() = sizes.back() - 1;
  return sizes;
}

// Checks all tensors of a loss whose logits are linear(x, weight, bias). Returns the shape of a
// per-token result.
inline std::vector<c10::SymInt> check_loss_inputs(const char* op, const Tensor& x,
                                                  const Tensor& weight, const Tensor& target,
                                                  const OptionalTensor& bias, int64_t shift = 0) {
  check_linear(op, x, "weight", weight, bias);
  return check_target(op, target, "x", x, "K", shift);
}

// Allocates a per-token result in the accumulation dtype.
inline Tensor empty_per_token(const Tensor& x, c10::SymIntArrayRef sizes) {
  return at::empty_symint(sizes, x.options().dtype(acc_dtype(x)));
}

inline void check_per_token(const char* op, const char* name, const Tensor& t, const Tensor& x,
                            c10::SymIntArrayRef sizes, const char* x_name = "x") {
  check_device(op, name, t, x_name, x);
  check_dtype(op, name, t, acc_dtype(x));
  check_shape(op, name, t, sizes, "the shape of a result per token");
}

// Checks dloss, the gradient with respect to the loss. `sizes` is the shape of a per-token result.
inline void check_dloss(const char* op, const Tensor& dloss, const Tensor& x,
                        const std::vector<c10::SymInt>& sizes, const LossOptions& options,
                        const char* x_name = "x") {
  check_device(op, "dloss", dloss, x_name, x);
  check_dtype(op, "dloss", dloss, acc_dtype(x));
  check_shape(op, "dloss", dloss,
              options.reduction == Reduction::kNone ? sizes : std::vector<c10::SymInt>(),
              "the loss's shape");
}

// Allocates the loss. If the op has a reduction, the loss is a scalar; otherwise it has the shape
// `sizes`.
inline Tensor empty_loss(const Tensor& x, const std::vector<c10::SymInt>& sizes,
                         const LossOptions& options) {
  return empty_per_token(
      x, options.reduction == Reduction::kNone ? sizes : std::vector<c10::SymInt>());
}

// Returns the targets of all rows as a contiguous int64 vector. If shift is 1, the target of
// position i is the token at position i + 1 of the sequence, and the last position of each sequence
// is ignored.
inline Tensor target_of_rows(const Tensor& target, const LossOptions& options) {
  const Tensor wide = target.to(at::kLong).contiguous();
  if (options.shift == 0) return wide.view({-1});
  const int64_t last = target.size(-1) - 1;
  Tensor shifted = at::full_like(wide, options.ignore_index.value());
  shifted.narrow(-1, 0, last).copy_(wide.narrow(-1, 1, last));
  return shifted.view({-1});
}

// Raises an error if a target is out of range. `targets` must be on the CPU. Returns the number of
// ignored targets.
inline int64_t check_targets(const char* op, const Tensor& targets, int64_t n,
                             const LossOptions& options) {
  const int64_t* const values = targets.const_data_ptr<int64_t>();
  int64_t ignored = 0;
  for (int64_t i = 0; i < targets.numel(); ++i) {
    const bool ignores = options.ignore_index && values[i] == *options.ignore_index;
    ignored += ignores;
    TW_CHECK(ignores || (values[i] >= 0 && values[i] < n), op,
             "target must be from 0 to N - 1 = ", n - 1,
             options.ignore_index ? " or ignore_index" : "", ", but got ", values[i]);
  }
  return ignored;
}

// copy_from_rows copies a vector with one element per row of x to a per-token result.
// rows_of_result converts a per-token result to such a vector. If shift is 1, the last position of
// each sequence has no per-token result, and rows_of_result sets the vector to 0 there.
inline void copy_from_rows(const Tensor& result, const Tensor& rows, const Tensor& target,
                           const LossOptions& options) {
  const Tensor all = rows.view(target.sizes());
  result.copy_(options.shift == 0 ? all : all.narrow(-1, 0, result.size(-1)));
}
inline Tensor rows_of_result(const Tensor& result, const Tensor& target,
                             const LossOptions& options) {
  if (options.shift == 0) return result.contiguous().view({-1});
  Tensor all = at::zeros(target.sizes(), result.options());
  all.narrow(-1, 0, result.size(-1)).copy_(result);
  return all.view({-1});
}

// Returns the divisor for reduction='mean', which is the number of targets that are not ignored.
// The result is a scalar tensor on the device of `targets`.
inline Tensor count_targets(const Tensor& targets, const LossOptions& options,
                            at::ScalarType dtype) {
  return targets.ne(*options.ignore_index).sum().to(dtype);
}

// Computes `loss`, the result of the op, from `rows`, the losses of all rows of x. The elements of
// `rows` for ignored rows must be 0.
inline void reduce_loss(Tensor& loss, const Tensor& rows, const Tensor& target,
                        const Tensor& targets, const LossOptions& options) {
  if (options.reduction == Reduction::kNone) {
    copy_from_rows(loss, rows, target, options);
    return;
  }
  const Tensor sum = rows.sum();
  loss.copy_(options.reduction == Reduction::kSum
                 ? sum
                 : sum.div(count_targets(targets, options, sum.scalar_type())));
}

// Returns a vector with the gradient with respect to the loss of each row of x. If the op has a
// reduction, the stride of this vector may be 0.
inline Tensor dloss_of_rows(const Tensor& dloss, const Tensor& target, const Tensor& targets,
                            const LossOptions& options) {
  if (options.reduction == Reduction::kNone) return rows_of_result(dloss, target, options);
  const Tensor each = options.reduction == Reduction::kSum
                          ? dloss
                          : dloss.div(count_targets(targets, options, dloss.scalar_type()));
  return each.expand({targets.numel()});
}

// Returns the number of rows per chunk. All chunks have about the same number of rows. The logits
// of a chunk have at most 32 MiB, or 4 % of the bytes of all logits if this is more. `rows` must be
// at least 1.
inline int64_t loss_chunk_rows(int64_t rows, int64_t n, int64_t bytes_per_logit) {
  constexpr int64_t kMinBytes = int64_t{32} << 20, kShare = 25;
  const int64_t row_bytes = std::max<int64_t>(n * bytes_per_logit, 1);
  const int64_t limit = std::max(kMinBytes / row_bytes, rows / kShare);
  return divide_up(rows, divide_up(rows, std::max<int64_t>(limit, 1)));
}

}  // namespace torchweld
