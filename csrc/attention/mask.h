// Defines the mask for host and device code. The mask determines which keys a query row sees.
//
// Sequence b has key_end[b] keys, or seqlen_k keys if key_end is not given. Query row i has a
// position among the keys. The row sees key j if all of these conditions hold:
//   j >= leftpad[b]        the first leftpad keys of the sequence are padding
//   j >= key_start[b, i]   the first key of the row, for packed documents or chunks
//   j < key_end[b]         later keys are padding, or cache entries that are not filled yet
//   j <= position          if causal
//   j > position - window  and, without causal, j < position + window
// The position of row i is i + key_end[b] - seqlen_q (bottom-right aligned): in a KV cache, the
// last seqlen_q keys belong to the query rows. If key_end[b] < seqlen_q, the sequence is not a
// cache but is padded on the right. The position of row i is then i + min(0, seqlen_k - seqlen_q).
// If the position of a row is below leftpad[b], the row is padding and sees no key.
//
// If a row sees no key, its result is 0, its gradients are 0, and its lse is the logit of the sink,
// or -inf if there is no sink. Keys that no row of a sequence sees never affect the results, even
// if they are NaN.
//
// key_end may also have one value per row: key_end[b, i]. Then key_end[b, i] - 1 is the position of
// row i, and also the last key that the row may see. With such a key_end, `causal` changes nothing,
// and the window ends at that key. The CUDA kernels then require finite keys and values also at
// gaps. Gaps are keys that no row sees and that lie between keys that rows see. The gradients on
// tensor cores always require finite keys (not values) at gaps.
//
// ALiBi subtracts slope * |position - j| from the scaled score of a row and key j. It excludes one
// key_end per row, where a position is not the place of a token.
//
// leftpad, key_start and key_end stay on the device, so the host never waits for their values.
// Values below 0 count as 0. Values above seqlen_k count as seqlen_k. Without causal, leftpad = 0
// differs from no leftpad if seqlen_q > seqlen_k: with leftpad = 0, the rows at negative positions
// are padding.
#pragma once

#include <cstdint>

#include "attention/bias.h"
#include "attention/dropout.h"
#include "core/macros.h"

namespace torchweld {

// The keys [begin, end) that a query row sees. The row sees no key if begin >= end.
template <typename Int>
struct KeyRangeOf {
  Int begin;
  Int end;
  TW_HOST_DEVICE bool empty() const { return begin >= end; }
};
using KeyRange = KeyRangeOf<int64_t>;
using KeyRange32 = KeyRangeOf<int>;  // for kernels that lack the registers for a 64-bit range

// The mask of one sequence. Its values are clamped to the valid range.
template <typename Int_>
struct SequenceMaskOf {
  using Int = Int_;
  Int pad;                   // 0 if leftpad is not given
  Int end;                   // seqlen_k if key_end is not given
  const int32_t* key_start;  // (seqlen_q,), or null if not given
  const int32_t* row_ends;   // (seqlen_q,): the key_end of each row, or null if rows share `end`
};
using SequenceMask = SequenceMaskOf<int64_t>;
using SequenceMask32 = SequenceMaskOf<int>;  // requires that all sequence lengths fit in 32 bits

// The mask, the soft cap, the sinks, the dropout, the bias and the ALiBi slopes of a call, in the
// form that kernels read. An argument that is not given is null or 0.
struct MaskParams {
  static constexpr int64_t kMaxWindow = int64_t{1} << 40;

  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t window;            // at most kMaxWindow
  const int32_t* leftpad;    // (batch,)
  const int32_t* key_start;  // (batch, seqlen_q)
  const int32_t* key_end;    // (batch,), or (batch, seqlen_q) if has_row_ends
  // (nheads,): the attention sinks. A sink is one more logit of a head and has no value vector.
  const float* sink;
  float softcap;  // scores become softcap * tanh(score / softcap)
  bool causal;
  bool padded;        // leftpad is given
  bool has_row_ends;  // key_end has one value per row
  AttentionDropout dropout;
  AttentionBias bias;
  const float* alibi;  // (nheads,): the ALiBi slopes

  // Whether `causal`, the window or a key_end per row may let the rows of a sequence see different
  // keys. key_start does not count.
  TW_HOST_DEVICE bool is_uneven() const { return causal || window > 0 || has_row_ends; }

  // Whether some row may not see some key of its sequence.
  TW_HOST_DEVICE bool may_hide_keys() const {
    return is_uneven() || padded || key_start || key_end;
  }

  // Whether kernels must clear gaps (GapKeys). A gap is padding that lies between the first and the
  // last key that the rows of a block see.
  TW_HOST_DEVICE bool may_have_gaps() const { return causal && key_start && !has_row_ends; }

  // Whether the call has more than `causal` and `leftpad`, so that it needs a kernel for general
  // masks.
  bool is_general() const {
    return key_start || key_end || window > 0 || softcap > 0.f || sink || dropout.given() ||
           bias.given() || alibi;
  }

  // The position of query row i among all keys (bottom-right aligned).
  TW_HOST_DEVICE int64_t position(int64_t i) const { return i + seqlen_k - seqlen_q; }

  // The position of query row i in a sequence of `end` keys.
  template <typename Int>
  TW_HOST_DEVICE Int position(typename SequenceMaskOf<Int>::Int i, Int end) const {
    const Int rows = static_cast<Int>(seqlen_q), keys = static_cast<Int>(seqlen_k);
    const Int first = keys < rows ? keys - rows : 0, offset = end - rows;
    return i + (offset < first ? first : offset);
  }

  // Returns the ALiBi slope of a head. A slope below 0 counts as 0.
  TW_HOST_DEVICE float alibi_slope(int64_t head) const {
    return alibi[head] < 0.f ? 0.f : alibi[head];
  }

  // Clamps a value of leftpad or key_end to [0, seqlen_k].
  TW_HOST_DEVICE int64_t clamp_key(int64_t key) const {
    return key < 0 ? 0 : (key > seqlen_k ? seqlen_k : key);
  }

  // The number of padding keys at the start of sequence b. pad_32 is for kernels that require
  // seqlen_k to fit in 32 bits.
  TW_HOST_DEVICE int64_t pad(int64_t b) const { return leftpad ? clamp_key(leftpad[b]) : 0; }
  TW_HOST_DEVICE int pad_32(int64_t b) const {
    return leftpad ? static_cast<int>(clamp_key(leftpad[b])) : 0;
  }

  template <typename Int = int64_t>
  TW_HOST_DEVICE SequenceMaskOf<Int> sequence(int64_t b) const {
    const int64_t end = key_end && !has_row_ends ? clamp_key(key_end[b]) : seqlen_k;
    return {static_cast<Int>(pad(b)), static_cast<Int>(end),
            key_start ? key_start + b * seqlen_q : nullptr,
            has_row_ends ? key_end + b * seqlen_q : nullptr};
  }

  // Returns the keys that query row i sees if the mask has only `causal` and `leftpad`.
  TW_HOST_DEVICE KeyRange row_keys(int64_t i, int64_t pad) const {
    const int64_t pos = position(i);
    if (padded && pos < pad) return {0, 0};
    int64_t end = seqlen_k;
    if (causal && pos + 1 < end) end = pos + 1;
    return {pad, end};
  }

  // Returns the keys that query row i sees under any mask.
  TW_HOST_DEVICE KeyRange row_keys(int64_t i, const SequenceMask& sequence) const {
    const int64_t pos =
        sequence.row_ends ? clamp_key(sequence.row_ends[i]) - 1 : position(i, sequence.end);
    if (padded && pos < sequence.pad) return {0, 0};
    KeyRange keys = {sequence.pad, sequence.end};
    if (sequence.key_start && sequence.key_start[i] > keys.begin)
      keys.begin = sequence.key_start[i];
    if (window > 0 && pos - window + 1 > keys.begin) keys.begin = pos - window + 1;
    const int64_t end = causal || sequence.row_ends ? pos + 1
                        : window > 0                ? pos + window
                                                    : keys.end;
    if (end < keys.end) keys.end = end;
    return keys;
  }

  // Returns the keys that a query row at position `pos` sees. This version is for kernels that load
  // the values of several rows before they use them. `key_start` is the key_start of the row, or 0
  // if the mask has no key_start.
  TW_HOST_DEVICE KeyRange32 row_keys_32(int pos, int key_start,
                                        const SequenceMask32& sequence) const {
    constexpr int64_t kMaxWidth = int64_t{1} << 30;  // larger than every position
    const int width = static_cast<int>(window < kMaxWidth ? window : kMaxWidth);
    if (padded && pos < sequence.pad) return {0, 0};
    KeyRange32 keys = {sequence.pad, sequence.end};
    if (key_start > keys.begin) keys.begin = key_start;
    if (window > 0 && pos - width + 1 > keys.begin) keys.begin = pos - width + 1;
    const int end = causal || sequence.row_ends ? pos + 1 : window > 0 ? pos + width : keys.end;
    if (end < keys.end) keys.end = end;
    return keys;
  }

  // Returns the first query row that is not padding. The result is at least 0.
  TW_HOST_DEVICE int64_t first_row(int64_t pad) const {
    const int64_t row = padded ? pad - (seqlen_k - seqlen_q) : 0;
    return row < 0 ? 0 : row;
  }

  // Returns the first query row that sees `key` if the mask has only `causal` and `leftpad`. `key`
  // must not be padding.
  TW_HOST_DEVICE int64_t first_row_seeing(int64_t key, int64_t pad) const {
    int64_t row = first_row(pad);
    const int64_t diagonal = key - position(0);
    if (causal && row < diagonal) row = diagonal;
    return row;
  }
};

// Describes which keys kRows consecutive query rows of a sequence see. Rows behind the last row of
// the sequence see no key.
struct alignas(16) BlockMask {
  static constexpr int kRows = 64;
  int begin, end;  // [begin, end) holds all keys that rows see; INT_MAX and 0 if no row sees a key
  // Every row sees all keys of [last_begin, first_end). The two values are INT_MAX and 0 if some
  // row sees no key.
  int last_begin, first_end;
  uint64_t live;  // one bit per row, set if the row sees a key

  TW_HOST_DEVICE bool sees(unsigned row) const { return live >> (row % kRows) & 1; }
};

}  // namespace torchweld
