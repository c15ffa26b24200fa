// Definitions for all kernels of attention's backward: arguments, scratch memory and key ranges.
#pragma once

#include <type_traits>

#include "attention/bwd.h"
#include "attention/bwd_config.h"

namespace torchweld {

struct BackwardArgs {
  AttentionBackwardParams params;
  int64_t rows;  // seqlen_q rounded up to a multiple of attention_backward_row_pad
  // The number of parts into which the query heads of a kv head are divided. Each part has its own
  // blocks and its own partial dK and dV. Only Hopper's kernels use more than one part.
  unsigned group_parts;
  unsigned parts_at_once;  // the number of parts whose blocks run at the same time
  // The number of consecutive blocks or clusters that loop over the query tiles in the same
  // direction. The next `wave` blocks loop in the opposite direction. If `wave` is 0, every block
  // loops downwards.
  unsigned wave;
  float lse_factor;  // the exponent of P is score * score_factor - lse * lse_factor
  float score_factor;
  float shift;          // the kernels compute probabilities times 2^shift
  float* g_lse;         // (batch, nheads, rows): shift - lse * lse_factor
  float* g_delta;       // (batch, nheads, rows): sum(dout * out) * 2^-shift
  uint4* g_stat_slice;  // (batch, nheads, rows): replaces g_lse and g_delta; see StatSliceTile
  float* g_dq;  // (batch, nheads, rows, the tile's head_dim), in the order of the warps' registers
  float4* g_parts;  // partial dK and dV if group_parts > 1; see part_sums
  // Counters: the number of blocks that have added to a dQ tile, or to a warp's slice of a dQ tile.
  int* g_dq_semaphore;
  unsigned* g_tickets;  // one counter per launch: the number of blocks that have started

  // Returns the address of the partial dK or dV that part `part` computes for the 64 keys of tile
  // `tile`, with `columns` columns. The partial dK or dV has the layout of wgmma's accumulators:
  // (columns / 8, 128 threads) float4 values.
  __device__ __forceinline__ float4* part_sums(int part, int tile, bool of_dv, int columns) const {
    const AttentionSizes& sizes = params.sizes;
    const int64_t parts = sizes.batch * sizes.nheads_kv * group_parts;
    const int64_t tiles = attention_backward_part_tiles(sizes.seqlen_k);
    return g_parts + (((of_dv ? parts : 0) + part) * tiles + tile) * (columns / 8 * 128);
  }
};

static_assert(kAttentionBackwardRowPad == BlockMask::kRows);

// The arguments of the kernels for a general mask.
struct MaskedBackwardArgs : BackwardArgs {
  // cap is scale / softcap. A logit is softcap * tanh(score * cap), and score_factor multiplies the
  // logit.
  float cap;
  BlockMask* g_groups;  // (batch, rows / kAttentionBackwardRowPad)
  KeyRange32* g_live;   // (batch, rows): the keys that a row sees, or {0, 0} if it sees none

  // NOTE: these functions multiply in 32 bits, because the kernels have no registers for 64-bit
  // values.
  __device__ __forceinline__ const BlockMask& group_of(int sequence, int row) const {
    constexpr int kPad = kAttentionBackwardRowPad;
    const int groups = static_cast<int>(rows) / kPad;
    return g_groups[static_cast<int64_t>(sequence) * groups + static_cast<unsigned>(row) / kPad];
  }
  __device__ __forceinline__ const KeyRange32& live_of(int sequence, int row) const {
    return g_live[static_cast<int64_t>(sequence) * static_cast<int>(rows) + row];
  }
};

// The number of ticket counters in scratch memory. The kernels use two of them. The others are
// padding, so that the semaphores lie in another cache line.
inline constexpr int kBackwardTickets = 32;

// The maximum number of rows, keys or heads for the tiled kernels. They count in 32 bits, because
// they have no registers for 64-bit values. Larger problems use the general kernels.
inline constexpr int64_t kBackwardMaxSize = (int64_t{1} << 31) - 1024;

// The keys and the query rows of one sequence that the kernels read, if the mask consists of causal
// and leftpad only. All sizes fit in 32 bits (kBackwardMaxSize).
struct SequenceSpan {
  int pad;        // the first key that is not padding
  int first_row;  // the first query row that sees a key, or seqlen_q if no row does

  __device__ __forceinline__ SequenceSpan(const BackwardArgs& args, int64_t sequence)
      : pad(args.params.mask.pad_32(sequence)), first_row(first_row_seeing(args.params.mask, 0)) {}

  // Returns the first query row that sees `key` or a later key.
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

// Whether Args are the arguments for a general mask. Args is BackwardArgs or MaskedBackwardArgs.
template <typename Args>
inline constexpr bool kIsMasked = std::is_same_v<Args, MaskedBackwardArgs>;

// csrc/instantiations.py generates the files that instantiate this template. Each file has a few
// tiles of one dtype.
template <typename T, int kTile, typename Args>
void launch_attention_backward_tile(const Args& args, cudaStream_t stream);

// Launches the kernels for any head_dim (attention/general/bwd.cu).
template <typename T, typename Args>
void launch_attention_backward_general(const Args& args, cudaStream_t stream);

}  // namespace torchweld
