// softmax_matmul:  out = softmax(scale * scores) @ value over the keys that a row sees
//   scores (batch, nheads, seqlen_q, seqlen_k), value (batch, nheads, seqlen_k, head_dim_v),
//   out (batch, nheads, seqlen_q, head_dim_v)
//
// softmax_matmul_forward also returns lse (batch, nheads, seqlen_q), the logarithm of the softmax's
// denominator; the gradient rebuilds the probabilities from it. On the CPU the probabilities exist
// one block of rows at a time, on CUDA only in registers.
#include <ATen/Dispatch.h>
#include <ATen/ops/zeros_like.h>

#include "attention/mask_arguments.h"
#include "attention/saved_checks.h"
#include "core/dispatch.h"
#include "ops/softmax_matmul/cpu.h"

#ifdef TORCHWELD_CUDA
#include "attention/cuda_mask.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "layers/matmul.h"
#include "ops/softmax_matmul/softmax_matmul.h"
#endif

namespace torchweld::softmax_matmul_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;

// Returns out's sizes.
std::vector<c10::SymInt> softmax_matmul_checks(const char* op, const Tensor& scores,
                                               const Tensor& value, const OptionalTensor& leftpad,
                                               bool causal, double scale, TW_MASK_PARAMETERS) {
  check_floating(op, "scores", scores);
  check_dim(op, "scores", scores, 4, "(batch, nheads, seqlen_q, seqlen_k)");
  check_like(op, "value", value, "scores", scores);
  check_dim(op, "value", value, 4, "(batch, nheads, seqlen_k, head_dim_v)");
  check_shape(op, "value", value,
              {scores.sym_size(0), scores.sym_size(1), scores.sym_size(3), value.sym_size(3)},
              "(batch, nheads, seqlen_k, head_dim_v)");
  check_mask(op, {leftpad, causal, TW_MASK_ARGUMENTS}, scores.sym_size(0), scores.sym_size(1),
             scores.sym_size(2), "scores", scores);
  check_finite(op, "scale", scale);
  return with_last(scores, value.sym_size(3));
}

Tensor softmax_matmul_meta(const Tensor& scores, const Tensor& value, const OptionalTensor& leftpad,
                           bool causal, double scale, TW_MASK_PARAMETERS) {
  const auto sizes = softmax_matmul_checks("softmax_matmul", scores, value, leftpad, causal, scale,
                                           TW_MASK_ARGUMENTS);
  return at::empty_symint(sizes, scores.options());
}
TW_OP(softmax_matmul);

Forward softmax_matmul_forward_meta(const Tensor& scores, const Tensor& value,
                                    const OptionalTensor& leftpad, bool causal, double scale,
                                    TW_MASK_PARAMETERS) {
  const char* op = "softmax_matmul_forward";
  const auto sizes =
      softmax_matmul_checks(op, scores, value, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  return {at::empty_symint(sizes, scores.options()),
          at::empty_symint(without_last(scores), scores.options().dtype(acc_dtype(scores)))};
}
TW_OP(softmax_matmul_forward);

Grads softmax_matmul_backward_meta(const Tensor& dout, const Tensor& scores, const Tensor& value,
                                   const Tensor& out, const Tensor& lse,
                                   const OptionalTensor& leftpad, bool causal, double scale,
                                   TW_MASK_PARAMETERS) {
  const char* op = "softmax_matmul_backward";
  const auto sizes =
      softmax_matmul_checks(op, scores, value, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  check_attention_saved(op, dout, out, lse, sizes, "scores", scores);
  return {at::empty_symint(scores.sym_sizes(), scores.options()),
          at::empty_symint(value.sym_sizes(), value.options()), empty_dsink(sink, scores)};
}
TW_OP(softmax_matmul_backward);

// The op and its forward op, by what fills their results on a device.
template <auto into>
Tensor softmax_matmul_on(const Tensor& scores, const Tensor& value, const OptionalTensor& leftpad,
                         bool causal, double scale, TW_MASK_PARAMETERS) {
  Tensor out = softmax_matmul_meta(scores, value, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  into(out, nullptr, scores, value, {leftpad, causal, TW_MASK_ARGUMENTS}, scale);
  return out;
}

template <auto into>
Forward softmax_matmul_forward_on(const Tensor& scores, const Tensor& value,
                                  const OptionalTensor& leftpad, bool causal, double scale,
                                  TW_MASK_PARAMETERS) {
  auto [out, lse] =
      softmax_matmul_forward_meta(scores, value, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  into(out, &lse, scores, value, {leftpad, causal, TW_MASK_ARGUMENTS}, scale);
  return {out, lse};
}

// CPU. The scores with their columns adjacent.
Tensor adjacent_columns(const Tensor& scores) {
  return scores.stride(3) == 1 ? scores : scores.contiguous();
}

void softmax_matmul_into(Tensor& out, Tensor* lse, const Tensor& scores, const Tensor& value,
                         const MaskArguments& mask, double scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  const CpuAttention a(scores, value, mask, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "softmax_matmul",
      [&] { softmax_matmul_tiles<scalar_t>(a, out, lse, adjacent_columns(scores), value); });
}

constexpr auto softmax_matmul_cpu = softmax_matmul_on<softmax_matmul_into>;
constexpr auto softmax_matmul_forward_cpu = softmax_matmul_forward_on<softmax_matmul_into>;

Grads softmax_matmul_backward_cpu(const Tensor& dout, const Tensor& scores, const Tensor& value,
                                  const Tensor& out, const Tensor& lse,
                                  const OptionalTensor& leftpad, bool causal, double scale,
                                  TW_MASK_PARAMETERS) {
  auto [dscores, dvalue, dsink] = softmax_matmul_backward_meta(
      dout, scores, value, out, lse, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  const CpuAttention a(scores, value, {leftpad, causal, TW_MASK_ARGUMENTS}, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "softmax_matmul", [&] {
        softmax_matmul_backward_tiles<scalar_t>(a, dscores, dvalue, dsink, dout,
                                                adjacent_columns(scores), value, out, lse);
      });
  return {dscores, dvalue, dsink};
}

#ifdef TORCHWELD_CUDA
// A (batch, nheads, rows, columns) tensor as the kernels take it; a copy where the columns are not
// adjacent.
struct Heads {
  Tensor tensor;

  explicit Heads(const Tensor& t)
      : tensor(t.size(3) > 1 && t.stride(3) != 1 ? t.contiguous() : t) {}

  HeadsOperand operand() const {
    const void* data = tensor.const_data_ptr();
    // A dim of size 1 may have any stride.
    const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
    const auto aligned = [&](int64_t dim) { return stride(dim) * tensor.element_size() % 16 == 0; };
    return {data, stride(0), stride(1), stride(2),
            data && reinterpret_cast<uintptr_t>(data) % 16 == 0 && aligned(0) && aligned(1) &&
                aligned(2)};
  }
};

SoftmaxMatmulProblem problem_of(const Tensor& scores, const Tensor& value, const Vector& pads,
                                bool causal, double scale) {
  return {{scores.size(2), scores.size(3), causal, pads.tensor.defined()},
          scores.size(0),
          scores.size(1),
          value.size(3),
          pads.data<int32_t>(),
          static_cast<float>(scale),
          dtype_of(scores),
          matmul_may_use_tf32(scores)};
}

void softmax_matmul_into_cuda(Tensor& out, Tensor* lse, const Tensor& scores, const Tensor& value,
                              const MaskArguments& mask, double scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  const OnDevice on(scores.device());
  if (scores.numel() == 0) {  // no keys
    out.zero_();
    if (lse) lse->fill_(-std::numeric_limits<double>::infinity());
    if (lse && is_given(mask.sink)) lse->copy_(mask.sink->view({1, scores.size(1), 1}));
    return;
  }
  const Heads in_scores(scores), in_value(value);
  const Vector pads(mask.leftpad);
  const MaskOnDevice on_device(mask);
  MaskedSoftmaxMatmulParams params = {
      {problem_of(scores, value, pads, mask.causal, scale), in_scores.operand(), in_value.operand(),
       out.mutable_data_ptr(), lse ? mutable_data<float>(*lse) : nullptr, nullptr},
      on_device.mask};
  Tensor ticket;
  if (softmax_matmul_takes_sm90(params.problem, params.scores, params.value, device_facts())) {
    ticket = zero_counters(1, scores);
    params.counters = static_cast<unsigned*>(ticket.mutable_data_ptr());
  }
  launch_softmax_matmul(params, current_stream());
}

constexpr auto softmax_matmul_cuda = softmax_matmul_on<softmax_matmul_into_cuda>;
constexpr auto softmax_matmul_forward_cuda = softmax_matmul_forward_on<softmax_matmul_into_cuda>;

Grads softmax_matmul_backward_cuda(const Tensor& dout, const Tensor& scores, const Tensor& value,
                                   const Tensor& out, const Tensor& lse,
                                   const OptionalTensor& leftpad, bool causal, double scale,
                                   TW_MASK_PARAMETERS) {
  auto [dscores, dvalue, dsink] = softmax_matmul_backward_meta(
      dout, scores, value, out, lse, leftpad, causal, scale, TW_MASK_ARGUMENTS);
  const OnDevice on(scores.device());
  if (dscores.numel() == 0 || dvalue.numel() == 0) {
    dscores.zero_();
    dvalue.zero_();
    dsink.zero_();
    return {dscores, dvalue, dsink};
  }
  const Heads in_scores(scores), in_value(value), in_out(out), in_dout(dout);
  const Tensor in_lse = lse.contiguous();
  const Vector pads(leftpad);
  const MaskOnDevice on_device({leftpad, causal, TW_MASK_ARGUMENTS});
  Tensor sink_parts;  // of every row
  if (is_given(sink)) sink_parts = at::zeros_like(in_lse);
  const MaskedSoftmaxMatmulBackwardParams params = {
      {problem_of(scores, value, pads, causal, scale), in_scores.operand(), in_value.operand(),
       in_out.operand(), in_dout.operand(), const_data<float>(in_lse), dscores.mutable_data_ptr(),
       dvalue.mutable_data_ptr()},
      on_device.mask,
      sink_parts.defined() ? mutable_data<float>(sink_parts) : nullptr};
  const cudaStream_t stream = current_stream();
  launch_softmax_matmul_dscores(params, stream);
  launch_softmax_matmul_dvalue(params, stream);
  if (sink_parts.defined()) dsink.copy_(sink_parts.sum(at::IntArrayRef({0, 2})));
  return {dscores, dvalue, dsink};
}
#endif

struct SoftmaxMatmulFunction : torch::autograd::Function<SoftmaxMatmulFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& scores, const Tensor& value,
                               const OptionalTensor& leftpad, bool causal, double scale,
                               TW_MASK_PARAMETERS) {
    auto [out, lse] =
        call_softmax_matmul_forward.below(scores, value, leftpad, causal, scale, TW_MASK_ARGUMENTS);
    ctx->save_for_backward({scores, value, out, lse, or_undefined(leftpad), or_undefined(key_start),
                            or_undefined(key_end), or_undefined(sink)});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window"] = window;
    ctx->saved_data["softcap"] = softcap;
    return outputs_of(ctx, {out, lse});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(10);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    auto [dscores, dvalue, dsink] = call_softmax_matmul_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], optional(saved[4]),
        ctx->saved_data["causal"].toBool(), ctx->saved_data["scale"].toDouble(), optional(saved[5]),
        optional(saved[6]), ctx->saved_data["window"].toOptional<int64_t>(),
        ctx->saved_data["softcap"].toOptional<double>(), optional(saved[7]));
    all[0] = dscores, all[1] = dvalue;
    all[9] = if_wanted(saved[7].defined(), dsink);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "Tensor scores, Tensor value, ";
  const std::string mask =
      "Tensor? leftpad=None, *, bool causal=False, float scale=1.0, " TW_MASK_SCHEMA;
  define_op(m, "softmax_matmul(" + inputs + mask + ") -> Tensor", TW_KERNELS(softmax_matmul),
            recorded_by<SoftmaxMatmulFunction>(call_softmax_matmul, softmax_matmul_checks));
  define_op(m, "softmax_matmul_forward(" + inputs + mask + ") -> (Tensor out, Tensor lse)",
            TW_KERNELS(softmax_matmul_forward),
            recorded_by<SoftmaxMatmulFunction>(call_softmax_matmul_forward));
  define_op(m,
            "softmax_matmul_backward(Tensor dout, " + inputs + "Tensor out, Tensor lse, " + mask +
                ") -> (Tensor dscores, Tensor dvalue, Tensor dsink)",
            TW_KERNELS(softmax_matmul_backward), no_gradient_function());
  define_autocast(m, call_softmax_matmul);
  define_autocast(m, call_softmax_matmul_forward);
}

}  // namespace
}  // namespace torchweld::softmax_matmul_op
