// The kernels of attention's gradient share this: arguments, scratch memory, ranges of keys.
#pragma once

#include <type_traits>

#include "attention/bwd.h"
#include "attention/bwd_config.h"

namespace torchweld {

struct BackwardArgs {
  AttentionBackwardParams params;
  int64_t rows;  // seqlen_q, rounded up to attention_backward_row_pad
  // A kv head's query heads are divided into this many parts, each with its own blocks, dK and dV.
  // Always 1 but on Hopper.
  unsigned group_parts;
  unsigned parts_at_once;  // parts whose blocks run side by side
  // Blocks, or clusters, between changes of direction; 0: all loop over the query tiles downwards.
  unsigned wave;
  float lse_factor;  // score * score_factor - lse * lse_factor is the exponent of a probability
  float score_factor;
  float shift;      // stored probabilities are 2^shift times too large
  float* g_lse;     // (batch, nheads, rows): shift - lse * lse_factor
  float* g_delta;   // (batch, nheads, rows): sum(dout * out) * 2^-shift
  float* g_dq;      // (batch, nheads, rows, tile's head_dim) in the order of the warps' registers
  float4* g_parts;  // dK and dV of the parts where there are several; see part_sums
  int* g_dq_semaphore;  // blocks that have added to a dQ tile, or to a warp's share of it
  unsigned* g_tickets;  // blocks that have started, a counter per launch

  // The sums of 64 keys and `columns` columns of a part's dK or dV: (columns / 8, 128 threads), a
  // float4 each, as wgmma leaves them in registers.
  __device__ __forceinline__ float4* part_sums(int part, int tile, bool of_dv, int columns) const {
    const AttentionSizes& sizes = params.sizes;
    const int64_t parts = sizes.batch * sizes.nheads_kv * group_parts;
    const int64_t tiles = attention_backward_part_tiles(sizes.seqlen_k);
    return g_parts + (((of_dv ? parts : 0) + part) * tiles + tile) * (columns / 8 * 128);
  }
};

static_assert(kAttentionBackwardRowPad == BlockMask::kRows);

// The arguments under a general mask.
struct MaskedBackwardArgs : BackwardArgs {
  float cap;            // logits are softcap * tanh(score * cap), and score_factor is theirs
  BlockMask* g_groups;  // (batch, rows / kAttentionBackwardRowPad)
  KeyRange32* g_live;   // (batch, rows): a row's keys, 0 and 0 where it sees none

  // NOTE: products of 32 bits; the tiles have no registers for more.
  __device__ __forceinline__ const BlockMask& group_of(int sequence, int row) const {
    constexpr int kPad = kAttentionBackwardRowPad;
    const int groups = static_cast<int>(rows) / kPad;
    return g_groups[static_cast<int64_t>(sequence) * groups + static_cast<unsigned>(row) / kPad];
  }
  __device__ __forceinline__ const KeyRange32& live_of(int sequence, int row) const {
    return g_live[static_cast<int64_t>(sequence) * static_cast<int>(rows) + row];
  }
};

// Two tickets are in use; the padding puts the semaphores on another cache line.
inline constexpr int kBackwardTickets = 32;

// The tiles count rows, keys and heads in 32 bits, because 64 bits cost registers that they don't
// have. Larger problems use the general kernels.
inline constexpr int64_t kBackwardMaxSize = (int64_t{1} << 31) - 1024;

// The keys and query rows of one sequence that are read, under causal and leftpad alone. Sizes fit
// in 32 bits: kBackwardMaxSize.
struct SequenceSpan {
  int pad;        // the first key
  int first_row;  // the first query row that sees a key, seqlen_q where none does

  __device__ __forceinline__ SequenceSpan(const BackwardArgs& args, int64_t sequence)
      : pad(args.params.mask.pad_32(sequence)), first_row(first_row_seeing(args.params.mask, 0)) {}

  // The first query row that sees a key at `key` or later.
  __device__ __forceinline__ int first_row_seeing(const MaskParams& mask, int key) const {
    if (key < pad) key = pad;
    if (key >= mask.seqlen_k) return static_cast<int>(mask.seqlen_q);
    const int64_t row = mask.first_row_seeing(key, pad);
    return static_cast<int>(row < mask.seqlen_q ? row : mask.seqlen_q);
  }
};

template <typename T>
__device__ __forceinline__ const T* head_of(const AttentionTensor& tensor, int64_t sequence,
                                            int64_t head) {
  return static_cast<const T*>(tensor.data) + sequence * tensor.batch_stride +
         head * tensor.head_stride;
}

// Args: BackwardArgs or MaskedBackwardArgs.
template <typename Args>
inline constexpr bool kIsMasked = std::is_same_v<Args, MaskedBackwardArgs>;

// csrc/instantiations.py generates a file for a few tiles of a dtype.
template <typename T, int kTile, typename Args>
void launch_attention_backward_tile(const Args& args, cudaStream_t stream);

// Any head_dim (attention/general/bwd.cu).
template <typename T, typename Args>
void launch_attention_backward_general(const Args& args, cudaStream_t stream);

}  // namespace torchweld
