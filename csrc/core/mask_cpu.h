// CPU. Walks attention scores in blocks of query rows, so that memory stays linear in the sequence
// length and only live columns are touched.
#pragma once

#include <ATen/ops/ones.h>

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/mask.h"

namespace torchweld {

// Query rows [row, row + rows) of batch entries [batch, batch + batches) against keys
// [key, key + keys). Every row of a block sees at least one key.
struct ScoreBlock {
  int64_t batch, batches;
  int64_t row, rows;
  int64_t key, keys;

  // The part of a (batch, heads, seqlen_q, ...) tensor that belongs to the block's rows.
  Tensor rows_of(const Tensor& t) const { return t.narrow(0, batch, batches).narrow(2, row, rows); }
  // The part of a (batch, heads, seqlen_k, ...) tensor that belongs to the block's keys.
  Tensor keys_of(const Tensor& t) const { return t.narrow(0, batch, batches).narrow(2, key, keys); }
};

// Puts `value` where the causal rule hides a key. scores (..., rows, keys)
inline void fill_future(Tensor& scores, const ScoreBlock& block, const MaskRule& rule,
                        double value) {
  if (!rule.causal) return;
  const int64_t first_hidden =
      rule.position(block.row) + 1 - block.key;  // in the block's first row
  const int64_t start = std::clamp<int64_t>(first_hidden, 0, block.keys);
  if (start == block.keys) return;
  const Tensor hidden =
      at::ones({block.rows, block.keys - start}, scores.options().dtype(at::kBool))
          .triu(first_hidden - start);
  scores.narrow(-1, start, block.keys - start).masked_fill_(hidden, value);
}

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// Calls body(ScoreBlock) for every block with something to see. leftpad is on the CPU, so its
// values can be read.
template <typename Body>
void for_each_score_block(const MaskRule& rule, const OptionalTensor& leftpad, int64_t batch,
                          int64_t heads, const Body& body) {
  constexpr int64_t kBlockScores = 1 << 20;  // a few MB of scores stay in cache
  constexpr int64_t kMinRows = 16;
  if (heads == 0) return;
  const Tensor pads = is_given(leftpad) ? leftpad->contiguous() : Tensor();
  const int64_t per_batch = std::max<int64_t>(1, heads * rule.seqlen_q * rule.seqlen_k);
  const int64_t batches = pads.defined() ? 1
                                         : std::clamp<int64_t>(kBlockScores / per_batch, 1,
                                                               std::max<int64_t>(batch, 1));
  for (int64_t b = 0; b < batch; b += batches) {
    const int64_t width = std::min(batches, batch - b);
    const int64_t pad = pads.defined() ? rule.clamp_pad(pads.const_data_ptr<int32_t>()[b]) : 0;
    if (pad >= rule.seqlen_k) continue;
    // Rows before the first visible key see nothing.
    int64_t row = rule.first_row(pad);
    if (rule.causal) row = std::max(row, pad - (rule.seqlen_k - rule.seqlen_q));
    int64_t step = std::max(kMinRows, kBlockScores / (width * heads * rule.seqlen_k + 1));
    // Two to four blocks even where one would do: what lies above the diagonal is left out
    // block-wise. More of them, or smaller ones, cost more in calls than they save.
    if (rule.causal) {
      const int64_t half = std::min<int64_t>(128, rule.seqlen_q / 2);
      step = std::min(step, std::max({int64_t{64}, half, rule.seqlen_q / 4}));
    }
    for (; row < rule.seqlen_q; row += step) {
      const int64_t rows = std::min(step, rule.seqlen_q - row);
      const int64_t end = rule.live(row + rows - 1, pad).end;
      body(ScoreBlock{b, width, row, rows, pad, end - pad});
    }
  }
}

}  // namespace torchweld
