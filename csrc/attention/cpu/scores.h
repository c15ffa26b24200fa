// CPU: applies mask, scale, soft cap and sinks to the scores of attention, softmax_matmul and
// causal_softmax.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/mask_arguments.h"
#include "core/simd_cpu.h"

namespace torchweld {

struct CpuScores {
  MaskParams mask;  // its softcap and sink are unset; the members below replace them
  double scale;
  double softcap;  // 0 if the call has no softcap
  Tensor sinks;    // (nheads,) in the dtype of the statistics, or undefined

  CpuScores(const Mask& args, int64_t seqlen_q, int64_t seqlen_k, double scale, at::ScalarType acc)
      : scale(scale), softcap(args.softcap.value_or(0)), tensors_(args.contiguous()) {
    mask = tensors_.params(seqlen_q, seqlen_k, [](const Tensor& t, auto zero) {
      return t.const_data_ptr<decltype(zero)>();
    });
    if (is_given(args.sink)) sinks = args.sink->to(acc).contiguous();
  }

  // Returns the smallest range that contains all keys that the query rows [row, row + rows) of
  // sequence b see.
  KeyRange keys_of_rows(int64_t b, int64_t row, int64_t rows) const {
    const SequenceMask sequence = mask.sequence(b);
    KeyRange all = {mask.seqlen_k, 0};
    for (int64_t i = row; i < row + rows; ++i) {
      const KeyRange keys = mask.row_keys(i, sequence);
      if (keys.empty()) continue;
      all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
    }
    return all.empty() ? KeyRange{0, 0} : all;
  }

  template <typename acc_t>
  acc_t sink(int64_t h) const {
    return sinks.defined() ? sinks.const_data_ptr<acc_t>()[h]
                           : -std::numeric_limits<acc_t>::infinity();
  }

 private:
  Mask tensors_;  // owns the memory that `mask` points to
};

// Computes scores = softcap * tanh(scores / softcap). Callers must call cap_row inside
// with_vectors.
template <typename acc_t>
inline void cap_row(acc_t* scores, int64_t count, acc_t softcap) {
  const acc_t inverse = 1 / softcap;
  for (int64_t i = 0; i < count; ++i) scores[i] = softcap * tanh_in_vectors(scores[i] * inverse);
}
template <typename acc_t>
void cap_tile(acc_t* scores, int64_t count, double softcap) {
  with_vectors([&] { cap_row(scores, count, static_cast<acc_t>(softcap)); });
}

}  // namespace torchweld
