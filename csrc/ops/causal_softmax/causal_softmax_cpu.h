// CPU: causal_softmax and its gradient row by row. scores, y, dy as (batch, heads, seqlen_q,
// seqlen_k) with adjacent columns; results contiguous. A task is a block of 16 rows of a head.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/mask.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld {

// Calls body(b, h, i, the keys that the row sees) for every row, among threads; an empty range
// where it sees none.
template <typename Body>
void for_each_live_row(const MaskRule& rule, const OptionalTensor& leftpad, int64_t batch,
                       int64_t heads, const Body& body) {
  constexpr int64_t kRows = 16;
  const Tensor pads = is_given(leftpad) ? leftpad->contiguous() : Tensor();
  const int64_t all = batch * heads, blocks = (rule.seqlen_q + kRows - 1) / kRows;
  parallel_tasks(all * blocks, [&](int64_t task) {
    const int64_t b = task % all / heads, h = task % heads;
    const int64_t row = from_both_ends(task / all, blocks) * kRows;
    const int64_t pad = pads.defined() ? rule.clamp_pad(pads.const_data_ptr<int32_t>()[b]) : 0;
    with_vectors([&] {
      for (int64_t i = row; i < std::min(row + kRows, rule.seqlen_q); ++i) {
        const LiveRange live = rule.live(i, pad);
        body(b, h, i, live.empty() ? LiveRange{0, 0} : live);
      }
    });
  });
}

// y = softmax(scale * scores) over the live keys, 0 elsewhere.
template <typename T>
void causal_softmax_row(T* y, const T* scores, const LiveRange& live, int64_t n, double scale) {
  using acc_t = at::opmath_type<T>;
  const auto factor = static_cast<acc_t>(scale);
  constexpr int64_t kPart = 256;  // what the row is in the wider dtype, a part at a time
  acc_t part[kPart];
  const auto each_part = [&](const auto& body) {
    for (int64_t j = live.begin; j < live.end; j += kPart) {
      const int64_t count = std::min(kPart, live.end - j);
      for (int64_t c = 0; c < count; ++c) part[c] = static_cast<acc_t>(scores[j + c]) * factor;
      body(j, count);
    }
  };
  acc_t max = -std::numeric_limits<acc_t>::infinity(), sum = 0;
  each_part([&](int64_t, int64_t count) {
    const acc_t most = max_of(part, count);
    max = max > most ? max : most;
  });
  std::fill(y, y + live.begin, T(0));
  std::fill(y + live.end, y + n, T(0));
  if constexpr (std::is_same_v<T, acc_t>) {
    each_part([&](int64_t j, int64_t count) { sum += exp_and_sum(y + j, part, count, max); });
    const acc_t inverse = 1 / sum;
    for (int64_t j = live.begin; j < live.end; ++j) y[j] *= inverse;
  } else {
    // A rounded exponential can't be scaled, so it is computed twice.
    each_part([&](int64_t, int64_t count) { sum += exp_and_sum(part, part, count, max); });
    const acc_t inverse = 1 / sum;
    each_part([&](int64_t j, int64_t count) {
      for (int64_t c = 0; c < count; ++c) {
        y[j + c] = static_cast<T>(exp_in_vectors(part[c] - max) * inverse);
      }
    });
  }
}

// dscores = scale * y * (dy - sum(dy * y)) over the live keys, 0 elsewhere.
template <typename T>
void causal_softmax_backward_row(T* dscores, const T* dy, const T* y, const LiveRange& live,
                                 int64_t n, double scale) {
  using acc_t = at::opmath_type<T>;
  const auto factor = static_cast<acc_t>(scale);
  std::fill(dscores, dscores + live.begin, T(0));
  std::fill(dscores + live.end, dscores + n, T(0));
  const acc_t sum = dot<acc_t>(dy + live.begin, y + live.begin, live.end - live.begin);
  for (int64_t j = live.begin; j < live.end; ++j) {
    const acc_t p = static_cast<acc_t>(y[j]);
    dscores[j] = static_cast<T>(p * (static_cast<acc_t>(dy[j]) - sum) * factor);
  }
}

}  // namespace torchweld
