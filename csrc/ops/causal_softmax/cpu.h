// CPU: causal_softmax and its backward, row by row. scores, y and dy are (batch, heads, seqlen_q,
// seqlen_k) with stride 1 along the last dimension. Results are contiguous. A task computes a block
// of 16 rows of a head.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention/cpu/scores.h"
#include "core/parallel.h"

namespace torchweld {

// The sizes, the mask and the scale of a call. `scores` is (batch, heads, seqlen_q, seqlen_k).
struct CausalSoftmaxCpu : CpuScores {
  int64_t batch, heads;

  CausalSoftmaxCpu(const Mask& args, const Tensor& scores, double scale)
      : CpuScores(args, scores.size(2), scores.size(3), scale, acc_dtype(scores)),
        batch(scores.size(0)),
        heads(scores.size(1)) {}

  bool needs_scores() const { return softcap > 0 || sinks.defined(); }

  // Values that are the same for all rows of a head.
  template <typename acc_t>
  struct Head {
    int64_t n;  // the number of keys, which is the length of a row
    acc_t scale, softcap, inverse_cap, sink;

    // Loads scores, multiplies them by scale and applies the soft cap.
    template <typename T>
    void load(acc_t* to, const T* scores, int64_t count) const {
      for (int64_t c = 0; c < count; ++c) to[c] = static_cast<acc_t>(scores[c]) * scale;
      if (softcap > 0) cap_row(to, count, softcap);
    }
    // Returns exp(sink - max), or 0 without a sink.
    acc_t sink_exp(acc_t max) const {
      return sink == -std::numeric_limits<acc_t>::infinity() ? 0 : exp_in_vectors(sink - max);
    }
  };

  template <typename T, typename acc_t = at::opmath_type<T>>
  Head<acc_t> of_head(int64_t h) const {
    return {mask.seqlen_k, static_cast<acc_t>(scale), static_cast<acc_t>(softcap),
            softcap > 0 ? static_cast<acc_t>(1 / softcap) : 0, sink<acc_t>(h)};
  }
};

// Calls body(b, h, i, keys) for every row, in parallel. `keys` is the range of keys that the row
// sees, or [0, 0) if it sees none.
template <typename Body>
void for_each_live_row(const CausalSoftmaxCpu& a, const Body& body) {
  constexpr int64_t kRows = 16;
  const int64_t all = a.batch * a.heads, blocks = (a.mask.seqlen_q + kRows - 1) / kRows;
  parallel_tasks(all * blocks, [&](int64_t task) {
    const int64_t b = task % all / a.heads, h = task % a.heads;
    const int64_t row = from_both_ends(task / all, blocks) * kRows;
    const SequenceMask sequence = a.mask.sequence(b);
    with_vectors([&] {
      for (int64_t i = row; i < std::min(row + kRows, a.mask.seqlen_q); ++i) {
        const KeyRange live = a.mask.row_keys(i, sequence);
        body(b, h, i, live.empty() ? KeyRange{0, 0} : live);
      }
    });
  });
}

constexpr int64_t kSoftmaxChunk = 256;  // number of scores that are converted at a time

// Calls body(j, logits, count) for every chunk of a row. j is the first key of the chunk.
template <typename T, typename acc_t, typename Body>
void each_chunk(const T* scores, const KeyRange& live, const CausalSoftmaxCpu::Head<acc_t>& head,
                const Body& body) {
  acc_t logits[kSoftmaxChunk];
  for (int64_t j = live.begin; j < live.end; j += kSoftmaxChunk) {
    const int64_t count = std::min(kSoftmaxChunk, live.end - j);
    head.load(logits, scores + j, count);
    body(j, logits, count);
  }
}

template <typename T, typename acc_t>
acc_t max_of_row(const T* scores, const KeyRange& live, const CausalSoftmaxCpu::Head<acc_t>& head) {
  acc_t max = head.sink;
  each_chunk(scores, live, head, [&](int64_t, const acc_t* logits, int64_t count) {
    const acc_t chunk_max = max_of(logits, count);
    max = max > chunk_max ? max : chunk_max;
  });
  return max;
}

// Computes a row of y: the softmax of the scores over the live keys, and 0 elsewhere.
template <typename T, typename acc_t>
void causal_softmax_row(T* y, const T* scores, const KeyRange& live,
                        const CausalSoftmaxCpu::Head<acc_t>& head) {
  const acc_t max = max_of_row(scores, live, head);
  acc_t sum = head.sink_exp(max);
  std::fill(y, y + live.begin, T(0));
  std::fill(y + live.end, y + head.n, T(0));
  if constexpr (std::is_same_v<T, acc_t>) {
    each_chunk(scores, live, head, [&](int64_t j, acc_t* logits, int64_t count) {
      sum += exp_and_sum</*kSubnormals=*/true>(y + j, logits, count, max);
    });
    const acc_t inverse = 1 / sum;
    for (int64_t j = live.begin; j < live.end; ++j) y[j] *= inverse;
  } else {
    // Compute the exponentials twice. If they were stored in the dtype of y before the division,
    // this rounding would lose accuracy.
    each_chunk(scores, live, head, [&](int64_t, acc_t* logits, int64_t count) {
      sum += exp_and_sum(logits, logits, count, max);
    });
    const acc_t inverse = 1 / sum;
    each_chunk(scores, live, head, [&](int64_t j, acc_t* logits, int64_t count) {
      for (int64_t c = 0; c < count; ++c) {
        y[j + c] = static_cast<T>(exp_in_vectors(logits[c] - max) * inverse);
      }
    });
  }
}

// Computes a row of dscores. For live keys, dscores is scale * y * (dy - sum(dy * y)) times the
// slope of the cap. For all other keys, dscores is 0. If dsink is not null, *dsink becomes the
// row's term of the sink's gradient. The function reads `scores` only with softcap or a sink.
template <typename T, typename acc_t>
void causal_softmax_backward_row(T* dscores, const T* dy, const T* y, const T* scores,
                                 const KeyRange& live, const CausalSoftmaxCpu::Head<acc_t>& head,
                                 acc_t* dsink) {
  std::fill(dscores, dscores + live.begin, T(0));
  std::fill(dscores + live.end, dscores + head.n, T(0));
  if (live.empty()) return;
  const acc_t sum = dot<acc_t>(dy + live.begin, y + live.begin, live.end - live.begin);
  const auto gradient = [&](int64_t j) {
    return static_cast<acc_t>(y[j]) * (static_cast<acc_t>(dy[j]) - sum) * head.scale;
  };
  if (head.softcap > 0) {
    each_chunk(scores, live, head, [&](int64_t j, const acc_t* logits, int64_t count) {
      for (int64_t c = 0; c < count; ++c) {
        const acc_t t = logits[c] * head.inverse_cap;
        dscores[j + c] = static_cast<T>(gradient(j + c) * (1 - t * t));
      }
    });
  } else {
    for (int64_t j = live.begin; j < live.end; ++j) dscores[j] = static_cast<T>(gradient(j));
  }
  if (dsink) {
    const acc_t max = max_of_row(scores, live, head), sink_exp = head.sink_exp(max);
    acc_t total = sink_exp;
    each_chunk(scores, live, head, [&](int64_t, acc_t* logits, int64_t count) {
      total += exp_and_sum(logits, logits, count, max);
    });
    *dsink = -sink_exp / total * sum;
  }
}

}  // namespace torchweld
