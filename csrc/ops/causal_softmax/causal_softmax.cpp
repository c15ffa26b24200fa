// causal_softmax:  y = softmax(scale * scores) over the keys that a row sees, 0 elsewhere
//   scores, y (batch, ..., seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), leftpad (batch,)
// Gradient:        dscores = scale * y * (dy - sum(dy * y)) over the same keys, 0 elsewhere
//
// Bottom-right causal plus left padding (core/mask.h); hidden scores are not read.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "core/mask_cpu.h"

#ifdef TORCHWELD_CUDA
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "ops/causal_softmax/causal_softmax.h"
#endif

namespace torchweld::causal_softmax_room {
namespace {

c10::SymInt batch_of(const Tensor& scores) {
  return scores.dim() == 2 ? c10::SymInt(1) : scores.sym_size(0);
}

Tensor causal_softmax_meta(const Tensor& scores, const OptionalTensor& leftpad, double scale) {
  const char* op = "causal_softmax";
  check_floating(op, "scores", scores);
  check_min_dim(op, "scores", scores, 2, "(batch, ..., seqlen_q, seqlen_k)");
  check_leftpad(op, leftpad, batch_of(scores), "scores", scores);
  check_finite(op, "scale", scale);
  return at::empty_symint(scores.sym_sizes(), scores.options());
}
TW_OP(causal_softmax);

Tensor causal_softmax_backward_meta(const Tensor& dy, const Tensor& y,
                                    const OptionalTensor& leftpad, double scale) {
  const char* op = "causal_softmax_backward";
  check_floating(op, "dy", dy);
  check_min_dim(op, "dy", dy, 2, "(batch, ..., seqlen_q, seqlen_k)");
  check_like(op, "y", y, "dy", dy);
  check_shape(op, "y", y, dy.sym_sizes(), "dy's shape");
  check_leftpad(op, leftpad, batch_of(dy), "dy", dy);
  check_finite(op, "scale", scale);
  return at::empty_symint(y.sym_sizes(), y.options());
}
TW_OP(causal_softmax_backward);

MaskRule rule_of(const Tensor& scores, const OptionalTensor& leftpad) {
  return {scores.size(-2), scores.size(-1), /*causal=*/true, is_given(leftpad)};
}

// CPU. Scores as (batch, heads, seqlen_q, seqlen_k).
Tensor as_heads(const Tensor& t) {
  const int64_t batch = t.dim() == 2 ? 1 : t.size(0);
  int64_t heads = 1;
  for (int64_t d = 1; d < t.dim() - 2; ++d) heads *= t.size(d);
  return t.reshape({batch, heads, t.size(-2), t.size(-1)});
}

// CPU. The live columns of a block's rows.
Tensor live_part(const Tensor& t, const ScoreBlock& block) {
  return block.rows_of(t).narrow(3, block.key, block.keys);
}

Tensor causal_softmax_cpu(const Tensor& scores, const OptionalTensor& leftpad, double scale) {
  Tensor y = causal_softmax_meta(scores, leftpad, scale).zero_();
  if (y.numel() == 0) return y;
  const MaskRule rule = rule_of(scores, leftpad);
  const Tensor in = as_heads(scores), out = as_heads(y);
  for_each_score_block(rule, leftpad, in.size(0), in.size(1), [&](const ScoreBlock& block) {
    Tensor s = live_part(in, block).to(acc_dtype(in)) * scale;
    fill_future(s, block, rule, kHidden);
    s = at::_softmax(s, -1, /*half_to_float=*/false);
    fill_future(s, block, rule, 0);  // a row that is NaN is NaN only where it sees
    live_part(out, block).copy_(s);
  });
  return y;
}

Tensor causal_softmax_backward_cpu(const Tensor& dy, const Tensor& y, const OptionalTensor& leftpad,
                                   double scale) {
  Tensor dscores = causal_softmax_backward_meta(dy, y, leftpad, scale).zero_();
  if (dscores.numel() == 0) return dscores;
  const MaskRule rule = rule_of(y, leftpad);
  const auto dtype = acc_dtype(y);
  const Tensor in_dy = as_heads(dy), in_y = as_heads(y), out = as_heads(dscores);
  for_each_score_block(rule, leftpad, in_y.size(0), in_y.size(1), [&](const ScoreBlock& block) {
    // A hidden dy may be anything, NaN included, so it is replaced before it is used.
    Tensor weighted = live_part(in_dy, block).to(dtype, /*non_blocking=*/false, /*copy=*/true);
    fill_future(weighted, block, rule, 0);
    const Tensor part_y = live_part(in_y, block).to(dtype);
    weighted.mul_(part_y);
    if (scale != 1) weighted.mul_(scale);
    const Tensor sum = weighted.sum(-1, /*keepdim=*/true);
    Tensor to = live_part(out, block);
    at::addcmul_out(to, weighted, part_y, sum, /*value=*/-1);
    fill_future(to, block, rule, 0);  // 0 * NaN where the row's sum is NaN
  });
  return dscores;
}

#ifdef TORCHWELD_CUDA
CausalMask mask_of(const Tensor& scores, const Vector& leftpad, double scale) {
  const int64_t batch = scores.dim() == 2 ? 1 : scores.size(0);
  return {{scores.size(-2), scores.size(-1), /*causal=*/true, leftpad.tensor.defined()},
          leftpad.data<int32_t>(),
          scores.numel() / batch / scores.size(-1),
          static_cast<float>(scale)};
}

Tensor causal_softmax_cuda(const Tensor& scores, const OptionalTensor& leftpad, double scale) {
  Tensor y = causal_softmax_meta(scores, leftpad, scale);
  if (y.numel() == 0) return y;
  const OnDevice on(scores.device());
  const cudaStream_t stream = current_stream();
  const Rows in(scores);
  const Vector pads(leftpad);
  launch_causal_softmax({in.tensor.const_data_ptr(), y.mutable_data_ptr(), in.rows, in.n,
                         in.row_stride, dtype_of(scores)},
                        mask_of(scores, pads, scale), zero_counter_if_asked(scores), stream);
  return y;
}

Tensor causal_softmax_backward_cuda(const Tensor& dy, const Tensor& y,
                                    const OptionalTensor& leftpad, double scale) {
  Tensor dscores = causal_softmax_backward_meta(dy, y, leftpad, scale);
  if (dscores.numel() == 0) return dscores;
  const OnDevice on(y.device());
  const cudaStream_t stream = current_stream();
  const Rows in_dy(dy), in_y(y);
  const Vector pads(leftpad);
  launch_causal_softmax_backward(
      {in_dy.tensor.const_data_ptr(), in_y.tensor.const_data_ptr(), dscores.mutable_data_ptr(),
       in_y.rows, in_y.n, in_dy.row_stride, in_y.row_stride, dtype_of(y)},
      mask_of(y, pads, scale), zero_counter_if_asked(y), stream);
  return dscores;
}
#endif

struct CausalSoftmaxFunction : torch::autograd::Function<CausalSoftmaxFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& scores, const OptionalTensor& leftpad,
                        double scale) {
    Tensor y = call_causal_softmax.below(scores, leftpad, scale);
    ctx->save_for_backward({y, or_undefined(leftpad)});
    ctx->saved_data["scale"] = scale;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {call_causal_softmax_backward(grads[0], saved[0], optional(saved[1]),
                                         ctx->saved_data["scale"].toDouble()),
            Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "causal_softmax(Tensor scores, Tensor? leftpad=None, *, float scale=1.0) -> Tensor",
            TW_KERNELS(causal_softmax), recorded_by<CausalSoftmaxFunction>(call_causal_softmax));
  define_op(
      m,
      "causal_softmax_backward(Tensor dy, Tensor y, Tensor? leftpad=None, *, float scale=1.0) -> "
      "Tensor",
      TW_KERNELS(causal_softmax_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::causal_softmax_room
