// Options, checks and row vectors of the losses. Their logits are given, or linear(x, weight,
// bias): logits (..., N), x (..., K), weight (N, K), bias (N,), target (...). Runs on the CPU and
// on CUDA.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>

#include "core/index.h"
#include "layers/linear_common.h"
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

// Checks that a loss is a scalar, so that its gradient may be computed beside it.
inline void check_is_reduced(const char* op, const LossOptions& options) {
  TW_CHECK(options.reduction != Reduction::kNone, op,
           "reduction must be 'mean' or 'sum', but got 'none'");
}

// The checked options of a cross entropy.
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

// Checks target against x or logits, (..., size); returns the shape of a result per token.
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

// Checks all tensors of a loss of linear's logits; returns the shape of a result per token.
inline std::vector<c10::SymInt> check_loss_inputs(const char* op, const Tensor& x,
                                                  const Tensor& weight, const Tensor& target,
                                                  const OptionalTensor& bias, int64_t shift = 0) {
  check_linear(op, x, "weight", weight, bias);
  return check_target(op, target, "x", x, "K", shift);
}

// A vector per token, in the dtype of sums.
inline Tensor empty_per_token(const Tensor& x, c10::SymIntArrayRef sizes) {
  return at::empty_symint(sizes, x.options().dtype(acc_dtype(x)));
}

inline void check_per_token(const char* op, const char* name, const Tensor& t, const Tensor& x,
                            c10::SymIntArrayRef sizes, const char* x_name = "x") {
  check_device(op, name, t, x_name, x);
  check_dtype(op, name, t, acc_dtype(x));
  check_shape(op, name, t, sizes, "the shape of a result per token");
}

// Checks the gradient of a loss; `sizes` is the shape of a result per token.
inline void check_dloss(const char* op, const Tensor& dloss, const Tensor& x,
                        const std::vector<c10::SymInt>& sizes, const LossOptions& options,
                        const char* x_name = "x") {
  check_device(op, "dloss", dloss, x_name, x);
  check_dtype(op, "dloss", dloss, acc_dtype(x));
  check_shape(op, "dloss", dloss,
              options.reduction == Reduction::kNone ? sizes : std::vector<c10::SymInt>(),
              "the loss's shape");
}

// A loss, not yet filled; `sizes` is the shape of a result per token.
inline Tensor empty_loss(const Tensor& x, const std::vector<c10::SymInt>& sizes,
                         const LossOptions& options) {
  return empty_per_token(
      x, options.reduction == Reduction::kNone ? sizes : std::vector<c10::SymInt>());
}

// The targets of all rows, int64 and contiguous. A shift moves the targets of a sequence one
// position to the front and ignores its last position.
inline Tensor target_of_rows(const Tensor& target, const LossOptions& options) {
  const Tensor wide = target.to(at::kLong).contiguous();
  if (options.shift == 0) return wide.view({-1});
  const int64_t last = target.size(-1) - 1;
  Tensor shifted = at::full_like(wide, options.ignore_index.value());
  shifted.narrow(-1, 0, last).copy_(wide.narrow(-1, 1, last));
  return shifted.view({-1});
}

// Refuses targets out of range, on the CPU. Returns how many are ignored.
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

// Fills a result per token from a vector over all rows of x, and back with 0 for the rows that
// have no result.
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

// How many rows count for a mean, a tensor of the results' dtype.
inline Tensor count_targets(const Tensor& targets, const LossOptions& options,
                            at::ScalarType dtype) {
  return targets.ne(*options.ignore_index).sum().to(dtype);
}

// The loss of the op from the losses of all rows, 0 where a row is ignored.
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

// The gradient of each row's loss: a vector over all rows of x, of stride 0 after a reduction.
inline Tensor dloss_of_rows(const Tensor& dloss, const Tensor& target, const Tensor& targets,
                            const LossOptions& options) {
  if (options.reduction == Reduction::kNone) return rows_of_result(dloss, target, options);
  const Tensor each = options.reduction == Reduction::kSum
                          ? dloss
                          : dloss.div(count_targets(targets, options, dloss.scalar_type()));
  return each.expand({targets.numel()});
}

// Rows of a chunk, for at least one row: equal chunks whose logits have at most 32 MiB or 4 % of
// all logits.
inline int64_t loss_chunk_rows(int64_t rows, int64_t n, int64_t bytes_per_logit) {
  constexpr int64_t kMinBytes = int64_t{32} << 20, kShare = 25;
  const int64_t row_bytes = std::max<int64_t>(n * bytes_per_logit, 1);
  const int64_t limit = std::max(kMinBytes / row_bytes, rows / kShare);
  return divide_up(rows, divide_up(rows, std::max<int64_t>(limit, 1)));
}

}  // namespace torchweld
