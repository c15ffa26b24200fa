// The arguments by which attention, causal_softmax and softmax_matmul are told what a row sees and
// what becomes of its scores: their checks, and how an op takes them along. The rule is in mask.h.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention/mask.h"
#include "core/check.h"

namespace torchweld {

// As an op's schema and its functions have them, behind leftpad, causal and scale.
#define TW_MASK_SCHEMA                                                                    \
  "Tensor? key_start=None, Tensor? key_end=None, int? window=None, float? softcap=None, " \
  "Tensor? sink=None"
#define TW_MASK_PARAMETERS                                                                       \
  const OptionalTensor &key_start, const OptionalTensor &key_end, std::optional<int64_t> window, \
      std::optional<double> softcap, const OptionalTensor &sink
#define TW_MASK_ARGUMENTS key_start, key_end, window, softcap, sink

struct MaskArguments {
  const OptionalTensor& leftpad;  // int32 (batch,)
  bool causal;
  const OptionalTensor& key_start;  // int32 (batch, seqlen_q)
  const OptionalTensor& key_end;    // int32 (batch,)
  std::optional<int64_t> window;    // >= 1
  std::optional<double> softcap;    // > 0: scores become softcap * tanh(score / softcap)
  const OptionalTensor& sink;       // (nheads,): one more logit of a head, without a value

  MaskRule rule(int64_t seqlen_q, int64_t seqlen_k) const {
    return {seqlen_q, seqlen_k, causal, is_given(leftpad),
            std::min(window.value_or(0), MaskRule::kMaxWindow)};
  }
};

// `like` is the op's first tensor. No value of a tensor is looked at.
inline void check_mask(const char* op, const MaskArguments& mask, const c10::SymInt& batch,
                       const c10::SymInt& nheads, const c10::SymInt& seqlen_q,
                       const char* like_name, const Tensor& like) {
  check_leftpad(op, mask.leftpad, batch, like_name, like);
  if (is_given(mask.key_start)) {
    const char* name = "key_start";
    check_device(op, name, *mask.key_start, like_name, like);
    check_dtype(op, name, *mask.key_start, at::kInt);
    check_shape(op, name, *mask.key_start, {batch, seqlen_q}, "(batch, seqlen_q)");
    TW_CHECK(!is_given(mask.leftpad), op,
             "key_start must be given without leftpad, but got both; use ",
             "torch.maximum(key_start, leftpad[:, None])");
  }
  if (is_given(mask.key_end)) {
    const char* name = "key_end";
    check_device(op, name, *mask.key_end, like_name, like);
    check_dtype(op, name, *mask.key_end, at::kInt);
    check_shape(op, name, *mask.key_end, {batch}, "(batch,)");
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
}

// The gradient to a sink; (0,) where none is given.
inline Tensor empty_dsink(const OptionalTensor& sink, const Tensor& like) {
  return is_given(sink) ? at::empty_symint(sink->sym_sizes(), sink->options())
                        : at::empty({0}, like.options());
}

// A sequence's part of the mask, read on the CPU.
struct CpuMask {
  MaskRule rule;
  Tensor leftpad, key_start, key_end;  // contiguous, or undefined

  CpuMask(const MaskArguments& mask, int64_t seqlen_q, int64_t seqlen_k)
      : rule(mask.rule(seqlen_q, seqlen_k)),
        leftpad(contiguous(mask.leftpad)),
        key_start(contiguous(mask.key_start)),
        key_end(contiguous(mask.key_end)) {}

  SequenceMask sequence(int64_t b) const {
    const auto at = [&](const Tensor& t, int64_t otherwise) {
      return t.defined() ? rule.clamp_pad(t.const_data_ptr<int32_t>()[b]) : otherwise;
    };
    return {
        at(leftpad, 0), at(key_end, rule.seqlen_k),
        key_start.defined() ? key_start.const_data_ptr<int32_t>() + b * rule.seqlen_q : nullptr};
  }

  // The keys that rows [row, row + rows) of a sequence see, from the first to the last of them.
  LiveRange live(int64_t row, int64_t rows, const SequenceMask& sequence) const {
    LiveRange all = {rule.seqlen_k, 0};
    for (int64_t i = row; i < row + rows; ++i) {
      const LiveRange live = rule.live(i, sequence);
      if (live.empty()) continue;
      all = {std::min(all.begin, live.begin), std::max(all.end, live.end)};
    }
    return all.empty() ? LiveRange{0, 0} : all;
  }

 private:
  static Tensor contiguous(const OptionalTensor& t) {
    return is_given(t) ? t->contiguous() : Tensor();
  }
};

}  // namespace torchweld
