// Definitions for all forward kernels of attention and their launchers.
#pragma once

#include <algorithm>

#include "attention/params.h"
#include "attention/score_scale.h"
#include "core/index.h"

namespace torchweld {

// The variant of a kernel. Scale is the type that scales the scores. If kMasked is true, the kernel
// supports a general mask. Otherwise it supports only `causal` and `leftpad`.
template <bool>
struct AttentionVariant {
  static constexpr bool kMasked = false;
  using Scale = ScoreScale;
  static Scale scale(const AttentionParams& params) { return Scale(params.scale); }
};
template <>
struct AttentionVariant<true> {
  static constexpr bool kMasked = true;
  using Scale = CappedScale;
  static Scale scale(const AttentionParams& params) {
    return Scale(params.scale, params.mask.softcap);
  }
};

// The order of the blocks. The heads are divided into sections. Blocks are ordered by section, then
// by tile of query rows (the last rows first), then by head. The keys and values of a section stay
// in the L2 cache. Even short sequences have several sections, so that the first blocks need not
// wait for the keys of all heads. A section has fewer heads if a head has few tiles: the order of
// the tiles then matters less.
struct AttentionSchedule {
  int64_t section;  // the number of heads in a section
  int64_t tiles;    // the number of query tiles of a head
  int64_t first_block = 0;

  AttentionSchedule(const AttentionParams& params, int rows, int elem_size) {
    const AttentionSizes& sizes = params.sizes;
    tiles = divide_up(sizes.seqlen_q, rows);
    const int64_t section_bytes = std::clamp<int64_t>(tiles, 2, 8) * (2 << 20);
    const int64_t bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * elem_size;
    const int64_t fit = std::max<int64_t>(1, section_bytes / std::max<int64_t>(1, bytes));
    const int64_t heads = std::max<int64_t>(1, sizes.batch * sizes.nheads_kv);
    section = divide_up(heads, divide_up(heads, fit)) * (sizes.nheads / sizes.nheads_kv);
  }

  int64_t blocks(const AttentionParams& params) const {
    return params.sizes.batch * params.sizes.nheads * tiles;
  }
};

// csrc/instantiations.py generates the files that instantiate these templates. The instances of
// launch_attention_general are in attention/general/fwd.cu instead. `tile` is an index into
// kAttentionTiles.
template <typename T, AttentionMath kMath, bool kMasked>
void launch_attention_tiles(int tile, const AttentionParams& params, cudaStream_t stream);
template <bool kMasked>
void launch_attention_split_tiles(int tile, const AttentionParams& params, cudaStream_t stream);
template <typename T, bool kMasked>
void launch_attention_decode(const AttentionParams& params, cudaStream_t stream);
template <typename T>
void launch_attention_chain(const AttentionParams& params, cudaStream_t stream);
template <typename T, bool kMasked>
void launch_attention_wide(const AttentionParams& params, cudaStream_t stream);
template <bool kMasked>
void launch_attention_general(const AttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
