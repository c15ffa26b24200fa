// What attention and softmax_matmul share: the checks of a forward op's saved tensors, and on the
// CPU the softmax of one block of scores.
#pragma once

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>
#include <ATen/ops/zeros.h>

#include "core/check.h"
#include "core/mask_cpu.h"

namespace torchweld {

// out, dout (batch, nheads, seqlen_q, head_dim_v) and lse (batch, nheads, seqlen_q) of a backward.
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

// CPU. The exponentials of a block against each row's largest score, their sum, and its logarithm
// with that score added back. All (..., rows, keys) or (..., rows, 1).
struct BlockSoftmax {
  Tensor weights;
  Tensor sum;
  Tensor lse;

  explicit BlockSoftmax(Tensor scores) {
    const Tensor max = scores.amax(-1, /*keepdim=*/true);
    weights = scores.sub_(max).exp_();
    sum = weights.sum(-1, /*keepdim=*/true);
    lse = sum.log().add_(max);
  }
};

// CPU. dP -> dS in place: P * (dP - delta), with P from the scores and lse. delta (..., rows, 1)
// is sum(dout * out).
inline Tensor score_gradient(const Tensor& weights, Tensor dweights, const Tensor& delta) {
  return dweights.sub_(delta).mul_(weights);
}

// CPU. Heads of (batch, heads, rows, n) folded into the batch: (batch * heads, rows, n).
inline Tensor fold_heads(const Tensor& t) {
  return t.reshape({t.size(0) * t.size(1), t.size(2), t.size(3)});
}

}  // namespace torchweld
