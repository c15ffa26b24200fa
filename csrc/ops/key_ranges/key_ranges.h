// Computes which keys each token of packed sequences sees, in host and device code, and declares
// the launcher.
#pragma once

#ifdef TORCHWELD_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

struct KeyRangesParams {
  const int32_t* cu_seqlens_q;  // (sequences + 1,): 0, then the end of each sequence
  const int32_t* key_begin;     // (sequences,)
  const int32_t* key_end;       // (sequences,)
  int32_t* row_begin;           // (tokens,)
  int32_t* row_end;             // (tokens,)
  int64_t sequences;
  int64_t tokens;
  // A token sees `before` keys before its position and `after` keys behind its position. For either
  // field, -1 stands for no limit.
  int64_t before, after;
  // If top_left is true, the first query of a sequence has the position of the sequence's first
  // key. Otherwise the last query has the position of the last key.
  bool top_left;

  // Returns the number of sequences that end at or before `token`. This number is also the index of
  // the sequence that has the token.
  TW_HOST_DEVICE int64_t sequence_of(int64_t token) const {
    int64_t low = 0, high = sequences;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cu_seqlens_q[middle + 1] <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Writes the keys that `token` sees. Tokens behind the last sequence see no key.
  TW_HOST_DEVICE void write(int64_t token) const {
    const int64_t i = sequence_of(token);
    int64_t begin = tokens, end = 0;
    if (i < sequences) {
      begin = key_begin[i];
      end = key_end[i];
      const int64_t shift = top_left ? begin - cu_seqlens_q[i] : end - cu_seqlens_q[i + 1];
      const int64_t position = token + shift;
      if (before >= 0 && position - before > begin) begin = position - before;
      if (after >= 0 && position + after + 1 < end) end = position + after + 1;
    }
    row_begin[token] = static_cast<int32_t>(begin);
    row_end[token] = static_cast<int32_t>(end);
  }
};

#ifdef TORCHWELD_CUDA
void launch_key_ranges(const KeyRangesParams& params, cudaStream_t stream);
#endif

}  // namespace torchweld
