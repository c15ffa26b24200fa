// The parameters that the host passes to the kernels of causal_softmax.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

#include "attention/mask.h"
#include "core/fast_divide.h"
#include "softmax/params.h"

namespace torchweld {

// The mask arguments that a kernel supports. kCausal kernels support `causal` and leftpad. kRange
// kernels also support key_start, key_end and window. kCapped kernels also support softcap and
// sinks.
enum class MaskKind { kCausal, kRange, kCapped };

inline MaskKind mask_kind(const MaskParams& mask) {
  if (mask.softcap > 0.f || mask.sink) return MaskKind::kCapped;
  return mask.is_general() ? MaskKind::kRange : MaskKind::kCausal;
}

// The mask and the scale of scores (batch, ..., seqlen_q, seqlen_k). The kernels see the scores as
// a matrix with seqlen_k columns.
template <MaskKind kKind>
struct ScoresMask {
  static constexpr bool kMasked = true, kCapped = kKind == MaskKind::kCapped;
  MaskParams mask;
  int64_t rows_per_batch;
  float factor;
  FastDivisor fast_seqlen_q;
  FastDivisor fast_rows_per_batch;

  ScoresMask(const MaskParams& mask, int64_t rows_per_batch, float scale)
      : mask(mask),
        rows_per_batch(rows_per_batch),
        factor(scale),
        fast_seqlen_q(mask.seqlen_q),
        fast_rows_per_batch(rows_per_batch) {}

  TW_HOST_DEVICE float scale() const { return factor; }

  // Whether the register kernels support the mask. The register kernels count rows in 32 bits and
  // require a scale other than 0.
  bool tiled(int64_t rows) const { return rows <= INT32_MAX && factor != 0.f; }

  // Returns the columns that a row sees. `row` may exceed 32 bits.
  TW_HOST_DEVICE KeyRange live(int64_t row) const {
    const int64_t b = row / rows_per_batch, i = row % mask.seqlen_q;
    if constexpr (kKind == MaskKind::kCausal) return mask.row_keys(i, mask.pad(b));
    return general_keys(b, i);
  }

  // Returns the columns that a row sees, computed in 32 bits for the register kernels.
  TW_HOST_DEVICE KeyRange32 live_columns(int64_t row) const {
    const uint32_t r = static_cast<uint32_t>(row);
    if constexpr (kKind == MaskKind::kCausal) {
      const int seqlen_q = static_cast<int>(mask.seqlen_q);
      const int seqlen_k = static_cast<int>(mask.seqlen_k);
      const int i = static_cast<int>(r) - static_cast<int>(fast_seqlen_q.divide(r)) * seqlen_q;
      int pad = mask.leftpad ? mask.leftpad[fast_rows_per_batch.divide(r)] : 0;
      pad = pad < 0 ? 0 : (pad > seqlen_k ? seqlen_k : pad);
      // A row of padding needs no special case. Under `causal`, `end` is at most `pad` in such a
      // row, so its range of keys is empty.
      const int end = i + seqlen_k - seqlen_q + 1;
      return {pad, end < seqlen_k ? end : seqlen_k};
    } else {
      const KeyRange keys = general_keys(fast_rows_per_batch.divide(r),
                                         r - fast_seqlen_q.divide(r) * fast_seqlen_q.divisor());
      return {static_cast<int>(keys.begin), static_cast<int>(keys.end)};
    }
  }

  // Returns the logit of the sink of a row, or -inf if there is no sink.
  TW_HOST_DEVICE float sink(int64_t row) const {
    return mask.sink ? mask.sink[row % rows_per_batch / mask.seqlen_q] : -INFINITY;
  }

 private:
  TW_HOST_DEVICE KeyRange general_keys(int64_t b, int64_t i) const {
    const KeyRange keys = mask.row_keys(i, mask.sequence(b));
    return keys.empty() ? KeyRange{0, 0} : keys;
  }
};

// The mask and the scale of a call.
struct ScoresParams {
  MaskParams mask;
  int64_t rows_per_batch;
  float scale;
};

// The arguments that only the backward with softcap or a sink needs.
struct CappedBackward {
  const void* scores;  // (rows, n); rows are row_stride elements apart
  int64_t row_stride;
  float* sink_terms;  // (rows,): the term of each row in the sum dsink, or nullptr
};

void launch_causal_softmax(const SoftmaxParams& params, const ScoresParams& scores,
                           const ZeroCounter& counter, cudaStream_t stream);
void launch_causal_softmax_backward(const SoftmaxBackwardParams& params, const ScoresParams& scores,
                                    const CappedBackward& capped, const ZeroCounter& counter,
                                    cudaStream_t stream);

// Launchers for one element type and one ScoresMask. csrc/instantiations.py generates a separate
// file for each instance.
template <typename T, typename Mask>
void launch_causal_softmax_of(const SoftmaxParams& params, const Mask& mask,
                              const ZeroCounter& counter, cudaStream_t stream);
template <typename T, typename Mask>
void launch_causal_softmax_backward_of(const SoftmaxBackwardParams& params, const Mask& mask,
                                       const ZeroCounter& counter, cudaStream_t stream);
template <typename T>
void launch_capped_softmax_backward_of(const SoftmaxBackwardParams& params,
                                       const ScoresMask<MaskKind::kCapped>& mask,
                                       const CappedBackward& capped, cudaStream_t stream);

}  // namespace torchweld
