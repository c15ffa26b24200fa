// causal_softmax:  y = softmax(scale * scores) over the keys that a row sees, 0 elsewhere
//   scores, y (batch, ..., seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), leftpad (batch,)
// Gradient:        dscores = scale * y * (dy - sum(dy * y)) over the same keys, 0 elsewhere
//
// Bottom-right causal plus left padding (core/mask.h); hidden scores are not read.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "ops/causal_softmax/causal_softmax_cpu.h"

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

// CPU. Scores as (batch, heads, seqlen_q, seqlen_k) with adjacent columns.
Tensor as_heads(const Tensor& t) {
  const int64_t batch = t.dim() == 2 ? 1 : t.size(0);
  int64_t heads = 1;
  for (int64_t d = 1; d < t.dim() - 2; ++d) heads *= t.size(d);
  const Tensor rows = t.reshape({batch, heads, t.size(-2), t.size(-1)});
  return rows.stride(3) == 1 ? rows : rows.contiguous();
}

// CPU. Where a row of such a tensor begins.
template <typename T>
T* row_of(const Tensor& t, int64_t b, int64_t h, int64_t i) {
  return const_cast<T*>(t.const_data_ptr<T>()) + b * t.stride(0) + h * t.stride(1) +
         i * t.stride(2);
}

Tensor causal_softmax_cpu(const Tensor& scores, const OptionalTensor& leftpad, double scale) {
  Tensor y = causal_softmax_meta(scores, leftpad, scale);
  if (y.numel() == 0) return y;
  const MaskRule rule = rule_of(scores, leftpad);
  const Tensor in = as_heads(scores), out = as_heads(y);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "causal_softmax", [&] {
    for_each_live_row(rule, leftpad, in.size(0), in.size(1),
                      [&](int64_t b, int64_t h, int64_t i, const LiveRange& live) {
                        causal_softmax_row(row_of<scalar_t>(out, b, h, i),
                                           row_of<scalar_t>(in, b, h, i), live, rule.seqlen_k,
                                           scale);
                      });
  });
  return y;
}

Tensor causal_softmax_backward_cpu(const Tensor& dy, const Tensor& y, const OptionalTensor& leftpad,
                                   double scale) {
  Tensor dscores = causal_softmax_backward_meta(dy, y, leftpad, scale);
  if (dscores.numel() == 0) return dscores;
  const MaskRule rule = rule_of(y, leftpad);
  const Tensor in_dy = as_heads(dy), in_y = as_heads(y), out = as_heads(dscores);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "causal_softmax", [&] {
    for_each_live_row(rule, leftpad, in_y.size(0), in_y.size(1),
                      [&](int64_t b, int64_t h, int64_t i, const LiveRange& live) {
                        causal_softmax_backward_row(
                            row_of<scalar_t>(out, b, h, i), row_of<scalar_t>(in_dy, b, h, i),
                            row_of<scalar_t>(in_y, b, h, i), live, rule.seqlen_k, scale);
                      });
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
