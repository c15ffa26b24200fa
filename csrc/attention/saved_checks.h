// Checks the tensors that the forward of attention or softmax_matmul saves for its backward.
#pragma once

#include "core/check.h"

namespace torchweld {

// Checks out, dout (batch, nheads, seqlen_q, head_dim_v) and lse (batch, nheads, seqlen_q).
inline void check_attention_saved(const char* op, const Tensor& dout, const Tensor& out,
                                  const Tensor& lse, c10::SymIntArrayRef out_sizes,
                                  const char* like_name, const Tensor& like) {
  const char* layout = "(batch, nheads, seqlen_q, head_dim_v)";
  check_like(op, "dout", dout, like_name, like);
  check_shape(op, "dout", dout, out_sizes, layout);
  check_like(op, "out", out, like_name, like);
  check_shape(op, "out", out, out_sizes, layout);
  check_device(op, "lse", lse, like_name, like);
  check_dtype(op, "lse", lse, acc_dtype(like));
  check_shape(op, "lse", lse, out_sizes.slice(0, 3), "(batch, nheads, seqlen_q)");
}

}  // namespace torchweld
