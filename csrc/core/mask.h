// The causal and left-padding mask, in one place for host and device.
//
// Query row i of a sequence stands at position i + seqlen_k - seqlen_q among the keys (bottom-right
// aligned). It sees key j where
//   j >= leftpad     the first leftpad keys of the sequence are padding
//   j <= position    if causal
// A row whose own position is below leftpad is padding and sees nothing. A row that sees nothing
// gives 0, lse = -inf and gradients 0; what stands in hidden places is never used, NaN included.
//
// leftpad's values are data, so the host never waits for them: below 0 counts as 0, above seqlen_k
// as seqlen_k. leftpad = 0 is not the same as no leftpad where seqlen_q > seqlen_k without causal:
// the rows at negative positions are padding then.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TW_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TW_HOST_DEVICE inline
#endif

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

struct MaskRule {
  int64_t seqlen_q;
  int64_t seqlen_k;
  bool causal;
  bool padded;  // leftpad was given

  // The position of query row i among the keys: bottom-right aligned.
  TW_HOST_DEVICE int64_t position(int64_t i) const { return i + seqlen_k - seqlen_q; }

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

  // The first query row that is not padding, at least 0.
  TW_HOST_DEVICE int64_t first_row(int64_t pad) const {
    const int64_t row = padded ? pad - (seqlen_k - seqlen_q) : 0;
    return row < 0 ? 0 : row;
  }
};

}  // namespace torchweld
