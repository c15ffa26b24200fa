// Causal softmax with left padding: what the host hands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "core/fast_divide.h"
#include "core/mask.h"
#include "ops/softmax/softmax.h"

namespace torchweld {

// The mask and scale of scores (batch, ..., seqlen_q, seqlen_k) flattened to rows.
struct CausalMask {
  static constexpr bool kMasked = true;
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

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& mask,
                           const ZeroCounter& counter, cudaStream_t stream);
void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                    const ZeroCounter& counter, cudaStream_t stream);

// The same for one element type, each in a file of its own (csrc/instantiations.py).
template <typename T>
void launch_causal_softmax_of(const SoftmaxParams& params, const CausalMask& mask,
                              const ZeroCounter& counter, cudaStream_t stream);
template <typename T>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const CausalMask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream);

}  // namespace torchweld
