// The parameters that the host passes to the kernels of attention's backward.
#pragma once

#include "attention/params.h"

namespace torchweld {

// The rows of query, key, value, out and dout must start on 16-byte boundaries (AttentionTensor).
struct AttentionBackwardParams {
  AttentionTensor query;   // (batch, nheads, seqlen_q, head_dim)
  AttentionTensor key;     // (batch, nheads_kv, seqlen_k, head_dim)
  AttentionTensor value;   // (batch, nheads_kv, seqlen_k, head_dim_v)
  AttentionTensor out;     // (batch, nheads, seqlen_q, head_dim_v)
  AttentionTensor dout;    // (batch, nheads, seqlen_q, head_dim_v)
  const float* lse;        // (batch, nheads, seqlen_q), contiguous
  AttentionOutput dquery;  // (batch, nheads, seqlen_q, head_dim)
  AttentionOutput dkey;    // (batch, nheads_kv, seqlen_k, head_dim)
  AttentionOutput dvalue;  // (batch, nheads_kv, seqlen_k, head_dim_v)
  void* scratch;           // attention_backward_scratch_bytes() bytes, on a 16-byte boundary
  AttentionSizes sizes;
  MaskParams mask;
  float scale;
  bool tf32;  // fp32 matmuls may round to TF32
  DType dtype;
  AttentionChoice choice;
  const float* dlse;  // gradient with respect to lse, in the layout of lse, or nullptr
  // (batch, nheads, seqlen_q, seqlen_k): the gradient of the scaled scores, or null. It is an
  // output only if there is a bias. The kernels may not write the scores that a row does not see.
  AttentionOutput ds;
  float* dsink;  // (batch, nheads) or nullptr; the sum over the batch is dsink of a head
};

// Returns the size of the scratch memory in bytes. The size depends on the tensor sizes, the
// choice, `causal`, the current device, and on whether the mask is general. The memory needs no
// initialisation.
int64_t attention_backward_scratch_bytes(const AttentionBackwardParams& params);

// Writes every element of the gradients. Sizes may be 0.
void launch_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
