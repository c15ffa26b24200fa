// causal_softmax:  y = softmax(scale * scores) over the keys that a row sees, 0 elsewhere
//   scores, y (batch, ..., seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), leftpad (batch,)
// Gradient:        dscores = scale * y * (dy - sum(dy * y)) over the same keys, 0 elsewhere
//
// attention/mask.h defines the mask. Hidden scores are not read. With softcap or a sink, the
// backward also reads the scores. With softcap, the slope of the cap is one more factor of dscores.
// The gradient of a sink, with p_sink the softmax probability of the sink, is
//   dsink = -sum over rows of p_sink * sum(dy * y)
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "attention/mask_op.h"
#include "ops/causal_softmax/cpu.h"

#ifdef TORCHWELD_CUDA
#include "attention/mask_cuda.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "ops/causal_softmax/causal_softmax.h"
#endif

namespace torchweld::causal_softmax_op {
namespace {

using Grads = std::tuple<Tensor, Tensor>;

c10::SymInt batch_of(const Tensor& scores) {
  return scores.dim() == 2 ? c10::SymInt(1) : scores.sym_size(0);
}

// Returns the number of heads: the product of all dims between the batch and the rows.
c10::SymInt heads_of(const Tensor& scores) {
  c10::SymInt heads = 1;
  for (int64_t d = 1; d < scores.dim() - 2; ++d) heads *= scores.sym_size(d);
  return heads;
}

void check_causal_mask(const char* op, const Mask& mask, const char* name, const Tensor& scores) {
  check_mask(op, mask, batch_of(scores), heads_of(scores), scores.sym_size(-2), name, scores);
}

// The empty_* functions check the arguments of an op and allocate its results. They do not compute
// the results.
Tensor empty_causal_softmax(const Tensor& scores, const Mask& mask, double scale) {
  const char* op = "causal_softmax";
  check_floating(op, "scores", scores);
  check_min_dim(op, "scores", scores, 2, "(batch, ..., seqlen_q, seqlen_k)");
  check_causal_mask(op, mask, "scores", scores);
  check_finite(op, "scale", scale);
  return at::empty_symint(scores.sym_sizes(), scores.options());
}

Grads empty_causal_softmax_backward(const Tensor& dy, const Tensor& y, const Mask& mask,
                                    double scale, const OptionalTensor& scores) {
  const char* op = "causal_softmax_backward";
  check_floating(op, "dy", dy);
  check_min_dim(op, "dy", dy, 2, "(batch, ..., seqlen_q, seqlen_k)");
  check_like(op, "y", y, "dy", dy);
  check_shape(op, "y", y, dy.sym_sizes(), "dy's shape");
  check_causal_mask(op, mask, "dy", dy);
  check_finite(op, "scale", scale);
  if (mask.softcap || is_given(mask.sink)) {
    TW_CHECK(is_given(scores), op,
             "scores must be given with softcap or sink, but got None; use causal_softmax's");
    check_like(op, "scores", *scores, "dy", dy);
    check_shape(op, "scores", *scores, dy.sym_sizes(), "dy's shape");
  }
  return {at::empty_symint(y.sym_sizes(), y.options()), empty_dsink(mask.sink, y)};
}

constexpr auto causal_softmax_meta = causal_mask_op<empty_causal_softmax>;
constexpr auto causal_softmax_backward_meta = causal_mask_op<empty_causal_softmax_backward>;
TW_OP(causal_softmax);
TW_OP(causal_softmax_backward);

// CPU: returns t as (batch, heads, seqlen_q, seqlen_k) with stride 1 along the last dimension.
Tensor as_heads(const Tensor& t) {
  const int64_t batch = t.dim() == 2 ? 1 : t.size(0);
  int64_t heads = 1;
  for (int64_t d = 1; d < t.dim() - 2; ++d) heads *= t.size(d);
  const Tensor rows = t.reshape({batch, heads, t.size(-2), t.size(-1)});
  return rows.stride(3) == 1 ? rows : rows.contiguous();
}

// CPU: returns the address of a row of a tensor that as_heads returned.
template <typename T>
T* row_of(const Tensor& t, int64_t b, int64_t h, int64_t i) {
  return const_cast<T*>(t.const_data_ptr<T>()) + b * t.stride(0) + h * t.stride(1) +
         i * t.stride(2);
}

Tensor filled_causal_softmax_cpu(const Tensor& scores, const Mask& mask, double scale) {
  Tensor y = empty_causal_softmax(scores, mask, scale);
  if (y.numel() == 0) return y;
  const Tensor in = as_heads(scores), out = as_heads(y);
  const CausalSoftmaxCpu a(mask, in, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "causal_softmax", [&] {
    for_each_live_row(a, [&](int64_t b, int64_t h, int64_t i, const KeyRange& live) {
      causal_softmax_row(row_of<scalar_t>(out, b, h, i), row_of<scalar_t>(in, b, h, i), live,
                         a.of_head<scalar_t>(h));
    });
  });
  return y;
}
constexpr auto causal_softmax_cpu = causal_mask_op<filled_causal_softmax_cpu>;

Grads causal_softmax_grads_cpu(const Tensor& dy, const Tensor& y, const Mask& mask, double scale,
                               const OptionalTensor& scores) {
  auto [dscores, dsink] = empty_causal_softmax_backward(dy, y, mask, scale, scores);
  if (dscores.numel() == 0) {
    dsink.zero_();
    return {dscores, dsink};
  }
  const Tensor in_dy = as_heads(dy), in_y = as_heads(y), out = as_heads(dscores);
  const CausalSoftmaxCpu a(mask, in_y, scale);
  const Tensor in = a.needs_scores() ? as_heads(*scores) : in_y;
  Tensor sink_terms;  // (batch, heads, seqlen_q)
  if (a.sinks.defined()) {
    sink_terms = at::zeros({in.size(0), in.size(1), in.size(2)}, a.sinks.options());
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "causal_softmax", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    for_each_live_row(a, [&](int64_t b, int64_t h, int64_t i, const KeyRange& live) {
      acc_t* const part = sink_terms.defined() ? row_of<acc_t>(sink_terms, b, h, i) : nullptr;
      causal_softmax_backward_row(row_of<scalar_t>(out, b, h, i), row_of<scalar_t>(in_dy, b, h, i),
                                  row_of<scalar_t>(in_y, b, h, i), row_of<scalar_t>(in, b, h, i),
                                  live, a.of_head<scalar_t>(h), part);
    });
  });
  if (sink_terms.defined()) dsink.copy_(sink_terms.sum(at::IntArrayRef({0, 2})));
  return {dscores, dsink};
}
constexpr auto causal_softmax_backward_cpu = causal_mask_op<causal_softmax_grads_cpu>;

#ifdef TORCHWELD_CUDA
// Returns the parameters of the kernels. `mask` must come from kernel_mask.
ScoresParams params_of(const Tensor& scores, const Mask& mask, double scale) {
  const int64_t batch = scores.dim() == 2 ? 1 : scores.size(0);
  return {kernel_params(mask, scores.size(-2), scores.size(-1)),
          scores.numel() / batch / scores.size(-1), static_cast<float>(scale)};
}

Tensor filled_causal_softmax_cuda(const Tensor& scores, const Mask& mask, double scale) {
  Tensor y = empty_causal_softmax(scores, mask, scale);
  if (y.numel() == 0) return y;
  const OnDevice on(scores.device());
  const cudaStream_t stream = current_stream();
  const Rows in(scores);
  const Mask device_mask = kernel_mask(mask);
  launch_causal_softmax({const_data<void>(in.tensor), mutable_data<void>(y), in.rows, in.n,
                         in.row_stride, dtype_of(scores)},
                        params_of(scores, device_mask, scale), lazy_zero_counter(scores), stream);
  return y;
}
constexpr auto causal_softmax_cuda = causal_mask_op<filled_causal_softmax_cuda>;

Grads causal_softmax_grads_cuda(const Tensor& dy, const Tensor& y, const Mask& mask, double scale,
                                const OptionalTensor& scores) {
  auto [dscores, dsink] = empty_causal_softmax_backward(dy, y, mask, scale, scores);
  if (dscores.numel() == 0) {
    dsink.zero_();
    return {dscores, dsink};
  }
  const OnDevice on(y.device());
  const cudaStream_t stream = current_stream();
  const Rows in_dy(dy), in_y(y);
  const Mask device_mask = kernel_mask(mask);
  std::optional<Rows> in;
  CappedBackward capped{};
  if (mask.softcap || is_given(mask.sink)) {
    in.emplace(*scores);
    capped.scores = in->tensor.const_data_ptr();
    capped.row_stride = in->row_stride;
  }
  Tensor sink_terms;  // (batch, heads, seqlen_q)
  if (is_given(mask.sink)) {
    sink_terms = at::empty({y.dim() == 2 ? 1 : y.size(0), mask.sink->size(0), y.size(-2)},
                           y.options().dtype(at::kFloat));
    capped.sink_terms = mutable_data<float>(sink_terms);
  }
  launch_causal_softmax_backward(
      {const_data<void>(in_dy.tensor), const_data<void>(in_y.tensor), mutable_data<void>(dscores),
       in_y.rows, in_y.n, in_dy.row_stride, in_y.row_stride, dtype_of(y)},
      params_of(y, device_mask, scale), capped, lazy_zero_counter(y), stream);
  if (sink_terms.defined()) dsink.copy_(sink_terms.sum(at::IntArrayRef({0, 2})));
  return {dscores, dsink};
}
constexpr auto causal_softmax_backward_cuda = causal_mask_op<causal_softmax_grads_cuda>;
#endif

struct CausalSoftmaxFunction : torch::autograd::Function<CausalSoftmaxFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& scores, const OptionalTensor& leftpad,
                        double scale, const OptionalTensor& key_start,
                        const OptionalTensor& key_end, std::optional<int64_t> window,
                        std::optional<double> softcap, const OptionalTensor& sink) {
    Tensor y = call_causal_softmax.below(scores, leftpad, scale, key_start, key_end, window,
                                         softcap, sink);
    const bool needs_scores = softcap || is_given(sink);
    save_with_mask(ctx, {y, needs_scores ? scores : Tensor()},
                   {leftpad, /*causal=*/true, key_start, key_end, window, softcap, sink});
    ctx->saved_data["scale"] = scale;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Mask mask = saved_mask(ctx, saved);
    auto [dscores, dsink] = call_causal_softmax_backward(
        grads[0], saved[0], mask.leftpad, ctx->saved_data["scale"].toDouble(), mask.key_start,
        mask.key_end, mask.window, mask.softcap, mask.sink, optional(saved[1]));
    variable_list all(8);
    all[0] = dscores;
    all[7] = if_wanted(is_given(mask.sink), dsink);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string mask = "Tensor? leftpad=None, *, float scale=1.0, " TW_MASK_SCHEMA;
  define_op(m, "causal_softmax(Tensor scores, " + mask + ") -> Tensor", TW_KERNELS(causal_softmax),
            recorded_by<CausalSoftmaxFunction>(call_causal_softmax));
  define_op(m,
            "causal_softmax_backward(Tensor dy, Tensor y, " + mask +
                ", Tensor? scores=None) -> (Tensor dscores, Tensor dsink)",
            TW_KERNELS(causal_softmax_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::causal_softmax_op
