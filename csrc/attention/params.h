// The parameters that the host passes to the kernels of attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/config.h"
#include "attention/mask.h"
#include "core/batch_invariance.h"
#include "core/device.h"
#include "core/dtype.h"
#include "core/macros.h"

namespace torchweld {

// A tensor (batch, heads, rows, cols) with stride 1 along the last dimension. Strides are in
// elements. Every row starts on a 16-byte boundary. The elements between the end of a row and the
// next 16-byte boundary are zeros, so that cp.async can copy 16 bytes at a time.
struct AttentionTensor {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// A result (batch, heads, rows, cols) with stride 1 along the last dimension. Strides are in
// elements. They are multiples of cols, because the tensor is dense.
struct AttentionOutput {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;

  template <typename T>
  TW_HOST_DEVICE T* row(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<T*>(data) + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

struct AttentionSizes {
  int64_t batch;
  int64_t nheads;
  int64_t nheads_kv;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
};

struct AttentionParams {
  AttentionTensor query;  // (batch, nheads, seqlen_q, head_dim)
  AttentionTensor key;    // (batch, nheads_kv, seqlen_k, head_dim)
  AttentionTensor value;  // (batch, nheads_kv, seqlen_k, head_dim_v)
  AttentionOutput out;    // (batch, nheads, seqlen_q, head_dim_v)
  float* lse;             // (batch, nheads, seqlen_q), contiguous, or nullptr
  AttentionSizes sizes;
  MaskParams mask;
  float scale;
  bool tf32;  // fp32 matmuls may round to TF32
  DType dtype;
  AttentionChoice choice;
  // attention_partial_floats() returns the number of partials, and attention_flags() the number of
  // flags. block_flags() allocates the flags. If an array has no elements, its pointer is nullptr.
  float* partials;
  uint64_t* flags;
  // The ticket counter of Hopper's kernels. It is 0 before and after a call. For other kernels,
  // `counters` is nullptr.
  unsigned* counters;
  // Under a general mask, the tiles of keys start a multiple of key_grid behind the padding, or
  // behind the first key_start of a block's rows. In the batch-invariant mode
  // (core/batch_invariance.h) it is the number of keys of a tile: the tiles then do not depend on
  // the window of the block's other rows.
  int key_grid = 1;
};

inline AttentionMath attention_math(DType dtype, bool tf32) {
  if (dtype != DType::kFloat32) return AttentionMath::k16Bit;
  return tf32 ? AttentionMath::kTf32 : AttentionMath::kFloat32;
}

inline AttentionProblem attention_problem(const AttentionSizes& s, DType dtype, bool tf32,
                                          const MaskParams& mask) {
  const bool same_keys =
      mask.window == 0 && !mask.has_row_ends && !(mask.leftpad && mask.key_start);
  const bool packable = s.seqlen_q == 1 && s.nheads > s.nheads_kv && same_keys &&
                        mask.sink == nullptr && !mask.dropout.given() && !mask.bias.given() &&
                        !mask.alibi;
  return {s.seqlen_q,
          s.seqlen_k,
          s.head_dim,
          s.head_dim_v,
          attention_math(dtype, tf32),
          {s.batch * s.nheads, s.nheads / s.nheads_kv, mask.causal, mask.leftpad != nullptr,
           dtype == DType::kBFloat16, mask.window, mask.key_start || mask.has_row_ends,
           mask.softcap > 0.f, mask.dropout.given(), mask.bias.given(), packable,
           mask.alibi != nullptr},
          device_facts(),
          is_batch_invariant()};
}

// The number of flags of a call. A group consists of the splits of one tile of query rows. Every
// split has one flag, except the last split of a group. The block of the last split adds the
// partial results of the other splits. In the chain engine, a step has a flag for each row and for
// each group of columns of V.
inline int64_t attention_flags(const AttentionProblem& p, const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kChain) {
    return attention_decode_groups(p) * choice.splits *
           (AttentionDecodeTile::kRows + attention_chain_columns(p.head_dim_v));
  }
  if (choice.engine == AttentionEngine::kWide) return 0;
  return attention_decode_groups(p) * (choice.splits - 1);
}
// The number of floats for the partial results. Every split, except the last split of a group,
// stores the accumulators, the maximum and the sum of probabilities of each of its rows. The chain
// engine stores the probabilities of each step. The wide engine stores the results, the maximum and
// the sum of each row of all splits.
inline int64_t attention_partial_floats(const AttentionProblem& p, const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kChain) {
    const int64_t step_bytes = attention_chain_step_bytes(attention_step_keys(choice));
    return attention_decode_groups(p) * (choice.splits * step_bytes + kAttentionChainGroupBytes) /
           4;
  }
  if (choice.splits == 1) return 0;
  if (choice.engine == AttentionEngine::kWide) {
    return choice.splits * p.load.heads * p.seqlen_q * (p.head_dim_v + 2);
  }
  const AttentionDecodeTile& tile = kAttentionDecodeTiles[choice.tile];
  return attention_flags(p, choice) * AttentionDecodeTile::kRows * (tile.dim + 2);
}

// Launches the forward of attention. Sizes may be 0. If neither `out` nor `lse` has an element to
// write, the function launches nothing.
void launch_attention(const AttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
