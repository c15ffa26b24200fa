// What the kernels of attention's gradient share: their arguments, scratch memory, live ranges.
#pragma once

#include "ops/attention/attention_backward.h"
#include "ops/attention/attention_backward_config.h"

namespace torchweld {

struct BackwardArgs {
  AttentionBackwardParams params;
  MaskRule rule;
  int64_t rows;            // seqlen_q, rounded up to kAttentionBackwardRowPad
  unsigned heads_at_once;  // kv heads whose blocks come side by side
  float lse_factor;        // lse and the scores are multiplied by these before
  float score_factor;      // their difference is an exponent
  float shift;             // probabilities are kept 2^shift times too large
  float* g_lse;            // (batch, nheads, rows): shift - lse * lse_factor
  float* g_delta;          // (batch, nheads, rows): sum(dout * out) * 2^-shift
  float* g_dq;   // (batch, nheads, rows, tile's head_dim) in the order of the warps' registers
  int* g_turns;  // blocks that have added to a warp's share of a dQ tile
  unsigned* g_tickets;  // blocks that have started, one count for every launch
};

// Four keep what follows them on a 16-byte boundary; two are in use.
inline constexpr int kBackwardTickets = 4;

// Sequence lengths and numbers of heads above this take the general kernels, which count in 64
// bits: the tiles have no registers for it.
inline constexpr int64_t kBackwardMaxSize = (int64_t{1} << 31) - 1024;

// What of one sequence takes part. Rows and keys outside are never read. Sizes fit in 32 bits here:
// kBackwardMaxSize.
struct LiveSpan {
  int pad;        // first key
  int first_row;  // first query row that sees a key, seqlen_q where none does

  __device__ __forceinline__ LiveSpan(const BackwardArgs& args, int64_t sequence)
      : pad(args.params.leftpad
                ? static_cast<int>(args.rule.clamp_pad(args.params.leftpad[sequence]))
                : 0),
        first_row(first_row_seeing(args.rule, 0)) {}

  // The first query row that sees a key at `key` or later.
  __device__ __forceinline__ int first_row_seeing(const MaskRule& rule, int key) const {
    if (key < pad) key = pad;
    if (key >= rule.seqlen_k) return static_cast<int>(rule.seqlen_q);
    int64_t row = rule.first_row(pad);
    const int64_t diagonal = key - rule.position(0);
    if (rule.causal && row < diagonal) row = diagonal;
    return static_cast<int>(row < rule.seqlen_q ? row : rule.seqlen_q);
  }
};

template <typename T>
__device__ __forceinline__ const T* head_of(const AttentionTensor& tensor, int64_t sequence,
                                            int64_t head) {
  return static_cast<const T*>(tensor.data) + sequence * tensor.batch_stride +
         head * tensor.head_stride;
}

// In files for a few tiles of a dtype each (csrc/instantiations.py).
template <typename T, int kTile>
void launch_attention_backward_tile(const BackwardArgs& args, cudaStream_t stream);

// In attention_backward_general.cu: any head_dim.
template <typename T>
void launch_attention_backward_general(const BackwardArgs& args, cudaStream_t stream);

}  // namespace torchweld
