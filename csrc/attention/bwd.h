// The gradient of attention: the parameters that the host passes to the kernels.
#pragma once

#include "attention/params.h"

namespace torchweld {

// The rows of query, key, value, out and dout start on 16-byte boundaries (AttentionTensor). All
// results are contiguous.
struct AttentionBackwardParams {
  AttentionTensor query;  // (batch, nheads, seqlen_q, head_dim)
  AttentionTensor key;    // (batch, nheads_kv, seqlen_k, head_dim)
  AttentionTensor value;  // (batch, nheads_kv, seqlen_k, head_dim_v)
  AttentionTensor out;    // (batch, nheads, seqlen_q, head_dim_v)
  AttentionTensor dout;   // (batch, nheads, seqlen_q, head_dim_v)
  const float* lse;       // (batch, nheads, seqlen_q), contiguous
  void* dquery;           // like query
  void* dkey;             // like key
  void* dvalue;           // like value
  void* scratch;          // attention_backward_scratch_bytes() bytes, on a 16-byte boundary
  AttentionSizes sizes;
  MaskParams mask;
  float scale;
  bool tf32;  // fp32 matmuls in one TF32 pass
  DType dtype;
  AttentionChoice choice;
  const float* dlse;  // like lse, or null
  float* dsink;       // (batch, nheads): each sequence's partial sum; null without a sink
};

// The size of the launcher's scratch memory, which needs no initialisation. It depends on the
// sizes, the choice, causal, whether the mask is general, and the current device.
int64_t attention_backward_scratch_bytes(const AttentionBackwardParams& params);

// Sizes may be 0. Every element of the gradients is written.
void launch_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
