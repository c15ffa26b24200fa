// Definitions for all kernels of attention's backward: arguments, scratch memory and key ranges.
#pragma once

#include <climits>
#include <type_traits>

#include "attention/bwd.h"
#include "attention/bwd_config.h"

namespace torchweld {

struct BackwardArgs {
  AttentionBackwardParams params;
  int64_t rows;  // seqlen_q rounded up to a multiple of attention_backward_row_pad(choice)
  // The number of parts into which the query heads of a kv head are divided. Each part has its own
  // blocks and its own partial dK and dV. Only Hopper's kernels use more than one part.
  unsigned group_parts;
  unsigned parts_at_once;  // the number of parts whose blocks run at the same time
  // The number of consecutive blocks or clusters that loop over the query tiles in the same
  // direction. The next `wave` blocks loop in the opposite direction. If `wave` is 0, every block
  // loops downwards.
  unsigned wave;
  // Only for Hopper's kernels: whether the last block that adds to dQ of a query tile rounds this
  // dQ. If not, another kernel rounds dQ after all blocks.
  bool rounds_dq;
  float lse_factor;  // the exponent of P is score * score_factor - lse * lse_factor
  float score_factor;
  float shift;     // the kernels compute probabilities times 2^shift
  float* g_lse;    // (batch, nheads, rows): shift - lse * lse_factor
  float* g_delta;  // (batch, nheads, rows): sum(dout * out) * 2^-shift
  // (batch, nheads, rows): kernels with a StatSliceTile use this array instead of g_lse and
  // g_delta. Only the kernel for the sink still uses g_delta.
  uint4* g_stat_slice;
  // (batch, nheads, rows, the tile's head_dim): the fp32 sums of dQ, in the order in which the
  // warps hold them in registers.
  float* g_dq;
  float4* g_parts;  // partials of dK and dV if group_parts > 1 (see part_sums)
  // Counters. Each counter belongs to a dQ tile, or to one warp's slice of a dQ tile. It counts the
  // blocks that have added to this tile or slice.
  int* g_dq_semaphore;
  unsigned* g_tickets;  // one counter per launch: the number of tickets that blocks have drawn

  // Returns the address of a partial gradient: dV if of_dv is true, else dK. Part `part` computes
  // this partial for the 64 keys of key tile `tile`. The partial has `columns` columns and the
  // layout of wgmma's accumulators: (columns / 8, 128 threads) float4 values.
  __device__ __forceinline__ float4* part_sums(int part, int tile, bool of_dv, int columns) const {
    const AttentionSizes& sizes = params.sizes;
    const int64_t parts = sizes.batch * sizes.nheads_kv * group_parts;
    const int64_t tiles = attention_backward_part_tiles(sizes.seqlen_k);
    return g_parts + (((of_dv ? parts : 0) + part) * tiles + tile) * (columns / 8 * 128);
  }
};

static_assert(kAttentionBackwardRowPad == BlockMask::kRows);

// What a work tile under a general mask needs: the query rows with keys in the key tile, in whole
// groups, and the keys that these rows see. If there are no such rows, keys.end is 0.
struct alignas(16) KeyTileMask {
  KeyRange32 keys;
  int first_group, last_group;
};

// The arguments of the kernels for a general mask.
struct MaskedBackwardArgs : BackwardArgs {
  // cap is scale / softcap, or 0 if there is no soft cap. With a soft cap, a logit is softcap *
  // tanh(score * cap), and score_factor multiplies softcap * tanh(...) instead of the score.
  float cap;
  BlockMask* g_groups;       // (batch, rows / kAttentionBackwardRowPad)
  KeyRange32* g_live;        // (batch, rows): the keys that a row sees, or {0, 0} if it sees none
  KeyTileMask* g_key_tiles;  // (batch, key_tiles), not used by the general kernels
  int key_tiles;             // the number of key tiles, or 0
  int key_tile_keys;         // the number of keys of a key tile

  // NOTE: group_of() and live_of() multiply 32-bit values, because the kernels have no registers
  // for 64-bit operands.
  __device__ __forceinline__ const BlockMask& group_of(int sequence, int row) const {
    constexpr int kPad = kAttentionBackwardRowPad;
    const int groups = static_cast<int>(rows) / kPad;
    return g_groups[static_cast<int64_t>(sequence) * groups + static_cast<unsigned>(row) / kPad];
  }
  __device__ __forceinline__ const KeyRange32& live_of(int sequence, int row) const {
    return g_live[static_cast<int64_t>(sequence) * static_cast<int>(rows) + row];
  }
  __device__ __forceinline__ KeyTileMask key_tile_of(int sequence, int key_tile) const {
    // NOTE: without query rows, no kernel has written g_key_tiles.
    if (rows == 0) return {{INT_MAX, 0}, 0, 0};
    return g_key_tiles[static_cast<unsigned>(sequence * key_tiles + key_tile)];
  }
};

// The number of ticket counters in scratch memory. The kernels use two of them. The others are
// padding, so that tickets and semaphores lie in different cache lines.
inline constexpr int kBackwardTickets = 32;

// The maximum of seqlen_q, of seqlen_k and of batch * nheads in the backward. The kernels count in
// 32 bits, because they have no registers for 64-bit values. launch_attention_backward refuses
// larger problems.
inline constexpr int64_t kBackwardMaxSize = (int64_t{1} << 31) - 1024;

// Describes which keys and query rows of one sequence the kernels read. It is used if the mask has
// only `causal` and `leftpad`. All sizes fit in 32 bits (kBackwardMaxSize).
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

// The arguments of Hopper's kernels for a general mask with a soft cap, where has_capped_kernel()
// is true. Other kernels for a general mask also serve a soft cap.
struct CappedBackwardArgs : MaskedBackwardArgs {};

// The arguments of Hopper's kernels with dropout.
struct DroppedBackwardArgs : MaskedBackwardArgs {
  float kept_factor;  // of the probabilities that are kept

  explicit DroppedBackwardArgs(const MaskedBackwardArgs& args)
      : MaskedBackwardArgs(args), kept_factor(1.f) {
    const AttentionDropout& dropout = args.params.mask.dropout;
    if (dropout.given()) kept_factor = static_cast<float>(dropout.factor);
  }
};

// The arguments of Hopper's kernels with a bias. These kernels also drop probabilities, if the call
// has dropout.
struct BiasedBackwardArgs : DroppedBackwardArgs {
  using DroppedBackwardArgs::DroppedBackwardArgs;
};

// The arguments of Hopper's kernels with ALiBi.
struct AlibiBackwardArgs : MaskedBackwardArgs {};

// Whether Args are the arguments for a general mask. Args is BackwardArgs or a class that derives
// from it.
template <typename Args>
inline constexpr bool kIsMasked = std::is_base_of_v<MaskedBackwardArgs, Args>;
template <typename Args>
inline constexpr bool kIsCapped = std::is_same_v<Args, CappedBackwardArgs>;
template <typename Args>
inline constexpr bool kIsDropped = std::is_base_of_v<DroppedBackwardArgs, Args>;
template <typename Args>
inline constexpr bool kIsAlibi = std::is_same_v<Args, AlibiBackwardArgs>;
template <typename Args>
inline constexpr bool kIsBiased = std::is_same_v<Args, BiasedBackwardArgs>;

// csrc/instantiations.py generates the files that instantiate this template. Each file has a few
// tiles of one dtype.
template <typename T, int kTile, typename Args>
void launch_attention_backward_tile(const Args& args, cudaStream_t stream);

// Launches the kernels for head dims above 256 on Hopper (attention/wide/bwd.cuh).
template <typename T>
void launch_attention_backward_wide(const MaskedBackwardArgs& args, cudaStream_t stream);

// Launches the kernels for any head_dim (attention/general/bwd.cu).
template <typename T, typename Args>
void launch_attention_backward_general(const Args& args, cudaStream_t stream);

}  // namespace torchweld
