// The mask arguments of attention, causal_softmax and softmax_matmul, and their checks. mask.h
// defines which keys a row sees.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention/mask.h"
#include "core/check.h"

namespace torchweld {

struct Mask {
  OptionalTensor leftpad;  // int32 (batch,)
  bool causal;
  OptionalTensor key_start;       // int32 (batch, seqlen_q)
  OptionalTensor key_end;         // int32 (batch,), or (batch, seqlen_q): one end per row
  std::optional<int64_t> window;  // >= 1
  std::optional<double> softcap;  // > 0: scores become softcap * tanh(score / softcap)
  // (nheads,): the attention sinks. A sink is one more logit of a head and has no value vector.
  OptionalTensor sink;
  double dropout_p = 0;         // the probability with which a probability is dropped
  OptionalTensor dropout_seed;  // int64 (1,)
  OptionalTensor bias;          // (1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k)
  OptionalTensor alibi_slopes;  // (nheads,)

  bool has_row_ends() const { return is_given(key_end) && key_end->dim() == 2; }

  // Returns the mask with contiguous tensors. The bias keeps its strides.
  Mask contiguous() const {
    const auto of = [](const OptionalTensor& t) -> OptionalTensor {
      return is_given(t) ? OptionalTensor(t->contiguous()) : std::nullopt;
    };
    return {of(leftpad), causal,    of(key_start),    of(key_end), window,          softcap,
            of(sink),    dropout_p, of(dropout_seed), bias,        of(alibi_slopes)};
  }

  // Converts the mask to MaskParams. `data(tensor, zero)` must return the address of the elements
  // of a tensor, whose type is that of `zero`. softcap, sink, bias and alibi stay unset, because
  // the CPU code keeps them in another dtype.
  template <typename Data>
  MaskParams params(int64_t seqlen_q, int64_t seqlen_k, const Data& data) const {
    const auto address = [&](const OptionalTensor& t) -> const int32_t* {
      return is_given(t) ? data(*t, int32_t{}) : nullptr;
    };
    MaskParams params{};
    params.seqlen_q = seqlen_q;
    params.seqlen_k = seqlen_k;
    params.window = std::min(window.value_or(0), MaskParams::kMaxWindow);
    params.leftpad = address(leftpad);
    params.key_start = address(key_start);
    params.key_end = address(key_end);
    params.causal = causal;
    params.padded = is_given(leftpad);
    params.has_row_ends = has_row_ends();
    if (dropout_p > 0) {
      params.dropout = AttentionDropout::make(data(*dropout_seed, int64_t{}), dropout_p);
    }
    return params;
  }
};

// Checks the shapes and dtypes of the mask's tensors. Their values stay on the device and are not
// checked. `like` is the first tensor of the op. key_end may have one value per row only if
// `allows_row_ends` is true.
inline void check_mask(const char* op, const Mask& mask, const c10::SymInt& batch,
                       const c10::SymInt& nheads, const c10::SymInt& seqlen_q,
                       const char* like_name, const Tensor& like, bool allows_row_ends = false) {
  check_leftpad(op, mask.leftpad, batch, like_name, like);
  if (is_given(mask.key_start)) {
    const char* name = "key_start";
    check_device(op, name, *mask.key_start, like_name, like);
    check_dtype(op, name, *mask.key_start, at::kInt);
    check_shape(op, name, *mask.key_start, {batch, seqlen_q}, "(batch, seqlen_q)");
  }
  if (is_given(mask.key_end)) {
    const char* name = "key_end";
    check_device(op, name, *mask.key_end, like_name, like);
    check_dtype(op, name, *mask.key_end, at::kInt);
    if (allows_row_ends && mask.has_row_ends()) {
      check_shape(op, name, *mask.key_end, {batch, seqlen_q}, "(batch, seqlen_q)");
    } else {
      check_shape(op, name, *mask.key_end, {batch}, "(batch,)");
    }
  }
  if (mask.window) {
    TW_CHECK(*mask.window >= 1, op, "window must be at least 1, but got ", *mask.window,
             "; leave it out for no window");
  }
  if (mask.softcap) {
    TW_CHECK(std::isfinite(*mask.softcap) && *mask.softcap > 0, op,
             "softcap must be finite and above 0, but got ", *mask.softcap,
             "; leave it out for no cap");
  }
  if (is_given(mask.sink)) {
    const Tensor& sink = *mask.sink;
    check_device(op, "sink", sink, like_name, like);
    TW_CHECK(sink.scalar_type() == like.scalar_type() || sink.scalar_type() == acc_dtype(like), op,
             "sink must be ", dtype_name(like.scalar_type()), " like ", like_name, " or ",
             dtype_name(acc_dtype(like)), ", but got ", describe(sink), "; use sink.to(", like_name,
             ".dtype)");
    check_shape(op, "sink", sink, {nheads}, "(nheads,)");
  }
  TW_CHECK(mask.dropout_p >= 0 && mask.dropout_p <= 1, op,
           "dropout_p must be between 0 and 1, but got ", mask.dropout_p);
  if (mask.dropout_p > 0) {
    const char* name = "dropout_seed";
    TW_CHECK(is_given(mask.dropout_seed), op,
             "dropout_seed must be given with dropout_p, but got None; use ",
             "torch.randint(2**63 - 1, (1,), device=", like_name, ".device)");
    check_device(op, name, *mask.dropout_seed, like_name, like);
    check_dtype(op, name, *mask.dropout_seed, at::kLong);
    check_shape(op, name, *mask.dropout_seed, {1}, "(1,)");
  }
}

// Checks the bias. Its last dimension is never broadcast. `like` is the query.
inline void check_bias(const char* op, const Mask& mask, const Tensor& like,
                       const c10::SymInt& seqlen_k) {
  if (!is_given(mask.bias)) return;
  const Tensor& bias = *mask.bias;
  check_like(op, "bias", bias, "query", like);
  bool fits = bias.dim() == 4 && bias.sym_size(3) == seqlen_k;
  for (int64_t d = 0; fits && d < 3; ++d) {
    fits = bias.sym_size(d) == 1 || bias.sym_size(d) == like.sym_size(d);
  }
  TW_CHECK(fits, op, "bias must be (1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k) = (1 or ",
           like.sym_size(0), ", 1 or ", like.sym_size(1), ", 1 or ", like.sym_size(2), ", ",
           seqlen_k, "), but got ", describe(bias), "; use bias.view or bias.expand");
  TW_CHECK(!mask.softcap, op, "softcap must not be given with bias, but got both; ",
           "compute capped scores with a bias in torch");
}

// Checks the ALiBi slopes. `like` is the query.
inline void check_alibi_slopes(const char* op, const Mask& mask, const Tensor& like) {
  if (!is_given(mask.alibi_slopes)) return;
  const char* name = "alibi_slopes";
  const Tensor& slopes = *mask.alibi_slopes;
  check_device(op, name, slopes, "query", like);
  TW_CHECK(slopes.scalar_type() == like.scalar_type() || slopes.scalar_type() == at::kFloat, op,
           "alibi_slopes must be float32, or ", dtype_name(like.scalar_type()),
           " like query, but got ", describe(slopes), "; use alibi_slopes.float()");
  check_shape(op, name, slopes, {like.sym_size(1)}, "(nheads,)");
  TW_CHECK(!slopes.requires_grad() || !c10::GradMode::is_enabled(), op,
           "alibi_slopes must not require gradients, which they don't have; use ",
           "alibi_slopes.detach(), or bias for gradients");
  const char* other = is_given(mask.bias)   ? "bias"
                      : mask.softcap        ? "softcap"
                      : mask.dropout_p > 0  ? "dropout_p"
                      : mask.has_row_ends() ? "a key_end per row"
                                            : nullptr;
  TW_CHECK(!other, op, "alibi_slopes must not be given with ", other,
           ", but got both; pass the distances times the slopes as bias, or drop one of the two");
}

// Returns the gradient of the bias: ds (batch, nheads, seqlen_q, seqlen_k), the gradient of the
// scaled scores, summed over the dimensions that are broadcast.
inline Tensor bias_gradient(const Tensor& bias, const Tensor& ds) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < 3; ++d) {
    if (bias.size(d) == 1 && ds.size(d) != 1) dims.push_back(d);
  }
  const Tensor sum = dims.empty() ? ds : ds.sum(dims, /*keepdim=*/true);
  return sum.to(bias.scalar_type()).contiguous();
}

// Allocates the gradient of the sink, or a tensor of size (0,) if there is no sink.
inline Tensor empty_dsink(const OptionalTensor& sink, const Tensor& like) {
  return is_given(sink) ? at::empty_symint(sink->sym_sizes(), sink->options())
                        : at::empty({0}, like.options());
}

}  // namespace torchweld
