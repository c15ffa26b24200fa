// What the forward kernels of attention share with their launchers.
#pragma once

#include <cmath>

#include "ops/attention/attention.h"

namespace torchweld {

// The scale as probabilities use it: 2^((sign * s - max) * c), lse = size * max + log(sum).
// A scale of 0 multiplies the scores away, so that an infinite one is NaN as in torch.
struct ScoreScale {
  static constexpr float kLog2 = 1.44269504088896341f;  // of e
  float sign;
  float size;
  float c;

  explicit ScoreScale(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        size(scale == 0.f ? 1.f : (scale < 0.f ? -scale : scale)),
        c(size * kLog2) {}

#ifdef __CUDACC__
  // A row that sees nothing but -inf is NaN, as in torch.
  __device__ __forceinline__ float lse(float max, float sum) const {
    return sum > 0.f ? fmaf(max, size, logf(sum)) : NAN;
  }
#endif
};

// The same behind a cap: scores become logits, softcap * tanh(score * cap), and c is theirs.
struct CappedScale : ScoreScale {
  float softcap;  // 0: none
  float cap;

  CappedScale(float scale, float softcap)
      : ScoreScale(scale), softcap(softcap), cap(softcap > 0.f ? size / softcap : 0.f) {
    if (softcap > 0.f) size = 1.f, c = kLog2;
  }
};

// The kernels of a call without and with an AttentionMask.
template <bool>
struct AttentionVariant {
  static constexpr bool kMasked = false;
  using Params = AttentionParams;
  using Scale = ScoreScale;
  static Scale scale(const Params& params) { return Scale(params.scale); }
};
template <>
struct AttentionVariant<true> {
  static constexpr bool kMasked = true;
  using Params = MaskedAttentionParams;
  using Scale = CappedScale;
  static Scale scale(const Params& params) { return Scale(params.scale, params.mask.softcap); }
};

#ifdef __CUDACC__
// What a row's sums are divided by, as a factor, and its lse.
struct FinishedRow {
  float factor;
  float lse;
};

// With a sink's logit, -inf for none. It joins at the end: that is exact wherever it lies, a row
// that sees only -inf included.
__device__ __forceinline__ FinishedRow finish_row(const ScoreScale& scale, float max, float sum,
                                                  float sink) {
  if (sink > max * scale.size) {
    const float shrink = expf(fmaf(max, scale.size, -sink));
    const float total = fmaf(sum, shrink, 1.f);
    return {shrink / total, sink + logf(total)};
  }
  sum += expf(fmaf(-max, scale.size, sink));
  return {1.f / sum, scale.lse(max, sum)};
}
#endif

// The order of the blocks: sections of heads one after the other; in a section the tiles of query
// rows, the last rows first; for every tile the section's heads.
struct AttentionSchedule {
  int64_t section;  // heads
  int64_t tiles;    // a head
  int64_t first_block = 0;

  AttentionSchedule(const AttentionParams& params, int rows, int elem_size) {
    constexpr int64_t kCacheBytes = 32 << 20;
    const AttentionSizes& sizes = params.sizes;
    const int64_t group = sizes.nheads / sizes.nheads_kv;
    const int64_t bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * elem_size;
    section = kCacheBytes / (bytes > 0 ? bytes : 1) * group;
    if (section < group) section = group;
    tiles = (sizes.seqlen_q + rows - 1) / rows;
  }

  int64_t blocks(const AttentionParams& params) const {
    return params.sizes.batch * params.sizes.nheads * tiles;
  }
};

// One file each (csrc/instantiations.py); `tile` is an index into kAttentionTiles.
void launch_attention_float16(int tile, const AttentionParams& params, cudaStream_t stream);
void launch_attention_bfloat16(int tile, const AttentionParams& params, cudaStream_t stream);
void launch_attention_float32(int tile, const AttentionParams& params, cudaStream_t stream);
void launch_attention_tf32(int tile, const AttentionParams& params, cudaStream_t stream);
void launch_attention_float16(int tile, const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_bfloat16(int tile, const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_float32(int tile, const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_tf32(int tile, const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_decode_float16(const AttentionParams& params, cudaStream_t stream);
void launch_attention_decode_bfloat16(const AttentionParams& params, cudaStream_t stream);
void launch_attention_decode_float16(const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_decode_bfloat16(const MaskedAttentionParams& params, cudaStream_t stream);
void launch_attention_general(const AttentionParams& params, cudaStream_t stream);
void launch_attention_general(const MaskedAttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
