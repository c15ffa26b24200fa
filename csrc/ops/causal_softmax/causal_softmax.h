// Causal softmax: what the host hands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

#include "attention/mask_params.h"
#include "core/fast_divide.h"
#include "softmax/params.h"

namespace torchweld {

// The mask and scale of scores (batch, ..., seqlen_q, seqlen_k) flattened to rows.
struct CausalMask {
  static constexpr bool kMasked = true, kCapped = false;
  MaskRule rule;
  const int32_t* g_leftpad;  // (batch,), or null
  int64_t rows_per_batch;
  float factor;
  FastDivisor fast_seqlen_q;
  FastDivisor fast_rows_per_batch;

  CausalMask(const MaskRule& rule, const int32_t* g_leftpad, int64_t rows_per_batch, float scale)
      : rule(rule),
        g_leftpad(g_leftpad),
        rows_per_batch(rows_per_batch),
        factor(scale),
        fast_seqlen_q(rule.seqlen_q),
        fast_rows_per_batch(rows_per_batch) {}

  TW_HOST_DEVICE float scale() const { return factor; }

  // The register kernels count rows in 32 bits and want a scale with a sign.
  bool tiled(int64_t rows) const { return rows <= INT32_MAX && factor != 0.f; }

  // The columns that a row sees; `live` is for any row, `live_columns` for the register kernels.
  TW_HOST_DEVICE LiveRange live(int64_t row) const {
    const int64_t pad = g_leftpad ? rule.clamp_pad(g_leftpad[row / rows_per_batch]) : 0;
    return rule.live(row % rule.seqlen_q, pad);
  }

  TW_HOST_DEVICE RowRange live_columns(int64_t row) const {
    const uint32_t r = static_cast<uint32_t>(row);
    const int seqlen_q = static_cast<int>(rule.seqlen_q),
              seqlen_k = static_cast<int>(rule.seqlen_k);
    const int i = static_cast<int>(r) - static_cast<int>(fast_seqlen_q.divide(r)) * seqlen_q;
    int pad = g_leftpad ? g_leftpad[fast_rows_per_batch.divide(r)] : 0;
    pad = pad < 0 ? 0 : (pad > seqlen_k ? seqlen_k : pad);
    // Causal rows need no further look at the padding: a row above it ends before it begins.
    const int end = i + seqlen_k - seqlen_q + 1;
    return {pad, end < seqlen_k ? end : seqlen_k};
  }
};

// The same under an AttentionMask, of which it knows key_start, key_end and window.
struct RangeMask : CausalMask {
  AttentionMask mask;

  RangeMask(const CausalMask& causal, const AttentionMask& mask) : CausalMask(causal), mask(mask) {}

  TW_HOST_DEVICE LiveRange live(int64_t row) const {
    return live_of(row / rows_per_batch, row % rule.seqlen_q);
  }
  TW_HOST_DEVICE RowRange live_columns(int64_t row) const {
    const uint32_t r = static_cast<uint32_t>(row);
    const LiveRange live = live_of(fast_rows_per_batch.divide(r),
                                   r - fast_seqlen_q.divide(r) * fast_seqlen_q.divisor());
    return {static_cast<int>(live.begin), static_cast<int>(live.end)};
  }

 private:
  TW_HOST_DEVICE LiveRange live_of(int64_t b, int64_t i) const {
    const LiveRange live = mask.rule(rule).live(i, mask.sequence(rule, g_leftpad, b));
    return live.empty() ? LiveRange{0, 0} : live;
  }
};

// All of it: softcap and sink too.
struct CappedMask : RangeMask {
  static constexpr bool kCapped = true;
  using RangeMask::RangeMask;

  // The sink's logit in a row's softmax, -inf where none is given.
  TW_HOST_DEVICE float sink(int64_t row) const {
    return mask.sink ? mask.sink[row % rows_per_batch / rule.seqlen_q] : -INFINITY;
  }
};

// What the gradient needs with softcap or sink.
struct CappedBackward {
  const void* scores;  // (rows, n), row_stride elements apart
  int64_t row_stride;
  float* sink_parts;  // (rows,), or null: what every row adds to the gradient of its head's sink
};

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& causal,
                           const AttentionMask& mask, const ZeroCounter& counter,
                           cudaStream_t stream);
void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const CausalMask& causal,
                                    const AttentionMask& mask, const CappedBackward& capped,
                                    const ZeroCounter& counter, cudaStream_t stream);

// The same for one element type and mask, in files of their own (csrc/instantiations.py).
template <typename T, typename Mask>
void launch_causal_softmax_of(const SoftmaxParams& params, const Mask& mask,
                              const ZeroCounter& counter, cudaStream_t stream);
template <typename T, typename Mask>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const Mask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream);
template <typename T>
void launch_capped_softmax_backward_of(const SoftmaxBackwardParams& params, const CappedMask& mask,
                                       const CappedBackward& capped, cudaStream_t stream);

}  // namespace torchweld
