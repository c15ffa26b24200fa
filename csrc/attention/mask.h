// Which keys a query row sees, in one place for host and device.
//
// Sequence b has key_end[b] keys (seqlen_k without key_end). Its query row i has a position among
// them and sees key j where all of this holds:
//   j >= leftpad[b]        the first leftpad keys of the sequence are padding
//   j >= key_start[b, i]   the row's own first key: packed documents, chunks
//   j < key_end[b]         the keys behind are padding, or places of a cache that nobody has filled
//   j <= position          if causal
//   j > position - window  and without causal j < position + window
// The position is i + key_end[b] - seqlen_q (bottom-right aligned): a cache ends with the keys of
// its queries. A key_end below seqlen_q can't be a cache; it is the length of a sequence that is
// padded on the right, so row i has position i (i + seqlen_k - seqlen_q where seqlen_k < seqlen_q).
// A row whose own position is below leftpad is padding and sees nothing. A row that sees nothing
// gives 0, lse = -inf (with a sink the sink's logit) and gradients 0. What stands before the first
// or behind the last key that any row of a sequence sees is never used, NaN included.
//
// leftpad, key_start and key_end are data, so the host never waits for them: below 0 counts as 0,
// above seqlen_k as seqlen_k. leftpad = 0 is not the same as no leftpad where seqlen_q > seqlen_k
// without causal: the rows at negative positions are padding then.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// The keys [begin, end) that one query row sees; empty when begin >= end.
struct LiveRange {
  int64_t begin;
  int64_t end;
  TW_HOST_DEVICE bool empty() const { return begin >= end; }
};

// The same in 32 bits, for rows that fit in registers.
struct RowRange {
  int begin;
  int end;
};

// What one sequence has of the mask, clamped.
struct SequenceMask {
  int64_t pad;               // 0 without leftpad
  int64_t end;               // seqlen_k without key_end
  const int32_t* key_start;  // (seqlen_q,), or null
};

struct MaskRule {
  int64_t seqlen_q;
  int64_t seqlen_k;
  bool causal;
  bool padded;         // leftpad was given
  int64_t window = 0;  // 0: none; at most kMaxWindow

  static constexpr int64_t kMaxWindow = int64_t{1} << 40;

  // The position of query row i among the keys: bottom-right aligned.
  TW_HOST_DEVICE int64_t position(int64_t i) const { return i + seqlen_k - seqlen_q; }

  // The position in a sequence of `end` keys.
  TW_HOST_DEVICE int64_t position(int64_t i, int64_t end) const {
    const int64_t first = seqlen_k < seqlen_q ? seqlen_k - seqlen_q : 0;
    const int64_t offset = end - seqlen_q;
    return i + (offset < first ? first : offset);
  }

  // leftpad's values are data: out of range counts as the nearest end.
  TW_HOST_DEVICE int64_t clamp_pad(int64_t pad) const {
    return pad < 0 ? 0 : (pad > seqlen_k ? seqlen_k : pad);
  }

  // `pad` is clamped, 0 without leftpad.
  TW_HOST_DEVICE LiveRange live(int64_t i, int64_t pad) const {
    const int64_t pos = position(i);
    if (padded && pos < pad) return {0, 0};
    int64_t end = seqlen_k;
    if (causal && pos + 1 < end) end = pos + 1;
    return {pad, end};
  }

  // The same for any mask.
  TW_HOST_DEVICE LiveRange live(int64_t i, const SequenceMask& sequence) const {
    const int64_t pos = position(i, sequence.end);
    if (padded && pos < sequence.pad) return {0, 0};
    LiveRange live = {sequence.pad, sequence.end};
    if (sequence.key_start && sequence.key_start[i] > live.begin)
      live.begin = sequence.key_start[i];
    if (window > 0 && pos - window + 1 > live.begin) live.begin = pos - window + 1;
    const int64_t end = causal ? pos + 1 : window > 0 ? pos + window : live.end;
    if (end < live.end) live.end = end;
    return live;
  }

  // The first query row that is not padding, at least 0.
  TW_HOST_DEVICE int64_t first_row(int64_t pad) const {
    const int64_t row = padded ? pad - (seqlen_k - seqlen_q) : 0;
    return row < 0 ? 0 : row;
  }
};

}  // namespace torchweld
