// The definition of the mask, for host and device: the keys that a query row sees.
//
// Sequence b has key_end[b] keys (seqlen_k without key_end). Query row i has a position among them
// and sees key j where all of this holds:
//   j >= leftpad[b]        the first leftpad keys of the sequence are padding
//   j >= key_start[b, i]   the row's own first key: packed documents, chunks
//   j < key_end[b]         later keys are padding, or cache entries that are not filled yet
//   j <= position          if causal
//   j > position - window  and without causal j < position + window
// The position is i + key_end[b] - seqlen_q (bottom-right aligned): a cache ends with the keys of
// its queries. A key_end below seqlen_q can't be a cache; it is the length of a sequence that is
// padded on the right, so row i has position i (i + seqlen_k - seqlen_q where seqlen_k < seqlen_q).
// A row whose own position is below leftpad is padding and sees nothing. A row that sees nothing
// gives 0, lse = -inf (with a sink the sink's logit) and gradients 0. Keys before the first and
// after the last key that any row of a sequence sees are never used, NaN included, and values
// between them that no row sees: the padding between packed documents.
//
// leftpad, key_start and key_end are data, so the host never waits for them: below 0 counts as 0,
// above seqlen_k as seqlen_k. leftpad = 0 is not the same as no leftpad where seqlen_q > seqlen_k
// without causal: the rows at negative positions are padding then.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// The keys [begin, end) that a query row sees; none where begin >= end.
template <typename Int>
struct KeyRangeOf {
  Int begin;
  Int end;
  TW_HOST_DEVICE bool empty() const { return begin >= end; }
};
using KeyRange = KeyRangeOf<int64_t>;
using KeyRange32 = KeyRangeOf<int>;  // for kernels whose registers hold no 64-bit range

// The mask of one sequence, clamped.
struct SequenceMask {
  int64_t pad;               // 0 without leftpad
  int64_t end;               // seqlen_k without key_end
  const int32_t* key_start;  // (seqlen_q,), or null
};

// The mask, the cap of the scores and the sinks of a call, as kernels read them. Null and 0 stand
// for an argument that is not given.
struct MaskParams {
  static constexpr int64_t kMaxWindow = int64_t{1} << 40;

  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t window;            // at most kMaxWindow
  const int32_t* leftpad;    // (batch,)
  const int32_t* key_start;  // (batch, seqlen_q)
  const int32_t* key_end;    // (batch,)
  const float* sink;         // (nheads,): one more logit of a head, without a value
  float softcap;             // scores become softcap * tanh(score / softcap)
  bool causal;
  bool padded;  // leftpad is given

  // True where the kernels for causal and leftpad alone don't suffice.
  bool is_general() const { return key_start || key_end || window > 0 || softcap > 0.f || sink; }

  // The position of query row i among all keys: bottom-right aligned.
  TW_HOST_DEVICE int64_t position(int64_t i) const { return i + seqlen_k - seqlen_q; }

  // The position of query row i in a sequence of `end` keys.
  TW_HOST_DEVICE int64_t position(int64_t i, int64_t end) const {
    const int64_t first = seqlen_k < seqlen_q ? seqlen_k - seqlen_q : 0;
    const int64_t offset = end - seqlen_q;
    return i + (offset < first ? first : offset);
  }

  // A value of leftpad or key_end: out of range counts as the nearest end.
  TW_HOST_DEVICE int64_t clamp_key(int64_t key) const {
    return key < 0 ? 0 : (key > seqlen_k ? seqlen_k : key);
  }

  // The padding of sequence b; pad_32 is for kernels whose seqlen_k fits in 32 bits.
  TW_HOST_DEVICE int64_t pad(int64_t b) const { return leftpad ? clamp_key(leftpad[b]) : 0; }
  TW_HOST_DEVICE int pad_32(int64_t b) const {
    return leftpad ? static_cast<int>(clamp_key(leftpad[b])) : 0;
  }

  TW_HOST_DEVICE SequenceMask sequence(int64_t b) const {
    return {pad(b), key_end ? clamp_key(key_end[b]) : seqlen_k,
            key_start ? key_start + b * seqlen_q : nullptr};
  }

  // The keys of query row i under causal and leftpad alone.
  TW_HOST_DEVICE KeyRange row_keys(int64_t i, int64_t pad) const {
    const int64_t pos = position(i);
    if (padded && pos < pad) return {0, 0};
    int64_t end = seqlen_k;
    if (causal && pos + 1 < end) end = pos + 1;
    return {pad, end};
  }

  // The keys of query row i under any mask.
  TW_HOST_DEVICE KeyRange row_keys(int64_t i, const SequenceMask& sequence) const {
    const int64_t pos = position(i, sequence.end);
    if (padded && pos < sequence.pad) return {0, 0};
    KeyRange keys = {sequence.pad, sequence.end};
    if (sequence.key_start && sequence.key_start[i] > keys.begin)
      keys.begin = sequence.key_start[i];
    if (window > 0 && pos - window + 1 > keys.begin) keys.begin = pos - window + 1;
    const int64_t end = causal ? pos + 1 : window > 0 ? pos + window : keys.end;
    if (end < keys.end) keys.end = end;
    return keys;
  }

  // The first query row that is not padding, at least 0.
  TW_HOST_DEVICE int64_t first_row(int64_t pad) const {
    const int64_t row = padded ? pad - (seqlen_k - seqlen_q) : 0;
    return row < 0 ? 0 : row;
  }

  // The first query row that sees `key`, a key that is not padding, under causal and leftpad alone.
  TW_HOST_DEVICE int64_t first_row_seeing(int64_t key, int64_t pad) const {
    int64_t row = first_row(pad);
    const int64_t diagonal = key - position(0);
    if (causal && row < diagonal) row = diagonal;
    return row;
  }
};

// The keys that kRows query rows of a sequence see; rows after the last see none.
struct alignas(16) BlockMask {
  static constexpr int kRows = 64;
  int begin, end;             // no row sees a key outside; INT_MAX, 0: no row sees a key
  int last_begin, first_end;  // every row sees the keys between; INT_MAX, 0: some row sees none
  uint64_t live;              // a bit for every row that sees a key

  TW_HOST_DEVICE bool sees(unsigned row) const { return live >> (row % kRows) & 1; }
};

}  // namespace torchweld
