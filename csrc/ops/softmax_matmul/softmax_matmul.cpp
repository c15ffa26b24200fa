// softmax_matmul:  out = softmax(scale * scores) @ value over the keys that a row sees
//   scores (batch, nheads, seqlen_q, seqlen_k), value (batch, nheads, seqlen_k, head_dim_v),
//   out (batch, nheads, seqlen_q, head_dim_v)
//
// softmax_matmul_forward also returns lse (batch, nheads, seqlen_q), the logarithm of the
// denominator of the softmax. The backward recomputes the probabilities from lse. No code holds all
// probabilities: the CPU code holds the probabilities of one block of rows at a time, and the CUDA
// code holds probabilities only in registers.
#include <ATen/Dispatch.h>
#include <ATen/ops/zeros_like.h>

#include "attention/mask_op.h"
#include "attention/saved_checks.h"
#include "ops/softmax_matmul/cpu.h"

#ifdef TORCHWELD_CUDA
#include "attention/mask_cuda.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "ops/softmax_matmul/softmax_matmul.h"
#endif

namespace torchweld::softmax_matmul_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;

// Checks the arguments and returns the sizes of `out`.
std::vector<c10::SymInt> check_softmax_matmul(const char* op, const Tensor& scores,
                                              const Tensor& value, const Mask& mask, double scale) {
  check_floating(op, "scores", scores);
  check_dim(op, "scores", scores, 4, "(batch, nheads, seqlen_q, seqlen_k)");
  check_like(op, "value", value, "scores", scores);
  check_dim(op, "value", value, 4, "(batch, nheads, seqlen_k, head_dim_v)");
  check_shape(op, "value", value,
              {scores.sym_size(0), scores.sym_size(1), scores.sym_size(3), value.sym_size(3)},
              "(batch, nheads, seqlen_k, head_dim_v)");
  check_mask(op, mask, scores.sym_size(0), scores.sym_size(1), scores.sym_size(2), "scores",
             scores);
  check_finite(op, "scale", scale);
  return with_last(scores, value.sym_size(3));
}
constexpr auto softmax_matmul_checks = mask_op<check_softmax_matmul>;

// The empty_* functions check the arguments of an op and allocate its results. They do not compute
// the results.
Tensor empty_softmax_matmul(const Tensor& scores, const Tensor& value, const Mask& mask,
                            double scale) {
  return at::empty_symint(check_softmax_matmul("softmax_matmul", scores, value, mask, scale),
                          scores.options());
}

Forward empty_softmax_matmul_forward(const Tensor& scores, const Tensor& value, const Mask& mask,
                                     double scale) {
  const auto sizes = check_softmax_matmul("softmax_matmul_forward", scores, value, mask, scale);
  return {at::empty_symint(sizes, scores.options()),
          at::empty_symint(without_last(scores), scores.options().dtype(acc_dtype(scores)))};
}

Grads empty_softmax_matmul_backward(const Tensor& dout, const Tensor& scores, const Tensor& value,
                                    const Tensor& out, const Tensor& lse, const Mask& mask,
                                    double scale) {
  const char* op = "softmax_matmul_backward";
  const auto sizes = check_softmax_matmul(op, scores, value, mask, scale);
  check_attention_saved(op, dout, out, lse, sizes, "scores", scores);
  return {at::empty_symint(scores.sym_sizes(), scores.options()),
          at::empty_symint(value.sym_sizes(), value.options()), empty_dsink(mask.sink, scores)};
}

constexpr auto softmax_matmul_meta = mask_op<empty_softmax_matmul>;
constexpr auto softmax_matmul_forward_meta = mask_op<empty_softmax_matmul_forward>;
constexpr auto softmax_matmul_backward_meta = mask_op<empty_softmax_matmul_backward>;
TW_OP(softmax_matmul);
TW_OP(softmax_matmul_forward);
TW_OP(softmax_matmul_backward);

// Computes softmax_matmul or softmax_matmul_forward. `fill` is the function that computes the
// results on a device.
template <auto fill>
Tensor softmax_matmul_on(const Tensor& scores, const Tensor& value, const Mask& mask,
                         double scale) {
  Tensor out = empty_softmax_matmul(scores, value, mask, scale);
  fill(out, nullptr, scores, value, mask, scale);
  return out;
}

template <auto fill>
Forward softmax_matmul_forward_on(const Tensor& scores, const Tensor& value, const Mask& mask,
                                  double scale) {
  auto [out, lse] = empty_softmax_matmul_forward(scores, value, mask, scale);
  fill(out, &lse, scores, value, mask, scale);
  return {out, lse};
}

// CPU: returns the scores with stride 1 along the last dimension.
Tensor row_major(const Tensor& scores) {
  return scores.stride(3) == 1 ? scores : scores.contiguous();
}

void fill_softmax_matmul_cpu(Tensor& out, Tensor* lse, const Tensor& scores, const Tensor& value,
                             const Mask& mask, double scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  const CpuAttention a(scores, value, mask, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "softmax_matmul",
      [&] { softmax_matmul_tiles<scalar_t>(a, out, lse, row_major(scores), value); });
}

constexpr auto softmax_matmul_cpu = mask_op<softmax_matmul_on<fill_softmax_matmul_cpu>>;
constexpr auto softmax_matmul_forward_cpu =
    mask_op<softmax_matmul_forward_on<fill_softmax_matmul_cpu>>;

Grads softmax_matmul_grads_cpu(const Tensor& dout, const Tensor& scores, const Tensor& value,
                               const Tensor& out, const Tensor& lse, const Mask& mask,
                               double scale) {
  auto [dscores, dvalue, dsink] =
      empty_softmax_matmul_backward(dout, scores, value, out, lse, mask, scale);
  const CpuAttention a(scores, value, mask, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "softmax_matmul", [&] {
        softmax_matmul_backward_tiles<scalar_t>(a, dscores, dvalue, dsink, dout, row_major(scores),
                                                value, out, lse);
      });
  return {dscores, dvalue, dsink};
}
constexpr auto softmax_matmul_backward_cpu = mask_op<softmax_matmul_grads_cpu>;

#ifdef TORCHWELD_CUDA
// CUDA: a tensor (batch, nheads, rows, columns) with stride 1 along the last dimension. If t has
// another stride there, the constructor copies t.
struct Heads {
  Tensor tensor;

  explicit Heads(const Tensor& t)
      : tensor(t.size(3) > 1 && t.stride(3) != 1 ? t.contiguous() : t) {}

  HeadsOperand operand() const {
    const void* data = const_data<void>(tensor);
    // If a dim has only one element, its stride has no meaning, so it is set to 0.
    const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
    const auto aligned = [&](int64_t dim) { return stride(dim) * tensor.element_size() % 16 == 0; };
    return {data, stride(0), stride(1), stride(2),
            data && reinterpret_cast<uintptr_t>(data) % 16 == 0 && aligned(0) && aligned(1) &&
                aligned(2)};
  }
};

// Returns the problem of a call. `mask` must come from kernel_mask.
SoftmaxMatmulProblem problem_of(const Tensor& scores, const Tensor& value, const Mask& mask,
                                double scale) {
  return {kernel_params(mask, scores.size(2), scores.size(3)),
          scores.size(0),
          scores.size(1),
          value.size(3),
          static_cast<float>(scale),
          dtype_of(scores),
          matmul_may_use_tf32(scores)};
}

void fill_softmax_matmul_cuda(Tensor& out, Tensor* lse, const Tensor& scores, const Tensor& value,
                              const Mask& mask, double scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  const OnDevice on(scores.device());
  if (scores.numel() == 0) {  // there are no keys
    out.zero_();
    if (lse) lse->fill_(-std::numeric_limits<double>::infinity());
    if (lse && is_given(mask.sink)) lse->copy_(mask.sink->view({1, scores.size(1), 1}));
    return;
  }
  const Heads in_scores(scores), in_value(value);
  const Mask device_mask = kernel_mask(mask);
  SoftmaxMatmulParams params = {problem_of(scores, value, device_mask, scale),
                                in_scores.operand(),
                                in_value.operand(),
                                out.mutable_data_ptr(),
                                lse ? mutable_data<float>(*lse) : nullptr,
                                nullptr};
  Tensor ticket;
  if (softmax_matmul_uses_sm90(params.problem, params.scores, params.value, device_facts())) {
    ticket = zero_counters(1, scores);
    params.counters = static_cast<unsigned*>(mutable_data<void>(ticket));
  }
  launch_softmax_matmul(params, current_stream());
}

constexpr auto softmax_matmul_cuda = mask_op<softmax_matmul_on<fill_softmax_matmul_cuda>>;
constexpr auto softmax_matmul_forward_cuda =
    mask_op<softmax_matmul_forward_on<fill_softmax_matmul_cuda>>;

Grads softmax_matmul_grads_cuda(const Tensor& dout, const Tensor& scores, const Tensor& value,
                                const Tensor& out, const Tensor& lse, const Mask& mask,
                                double scale) {
  auto [dscores, dvalue, dsink] =
      empty_softmax_matmul_backward(dout, scores, value, out, lse, mask, scale);
  const OnDevice on(scores.device());
  if (dscores.numel() == 0 || dvalue.numel() == 0) {
    dscores.zero_();
    dvalue.zero_();
    dsink.zero_();
    return {dscores, dvalue, dsink};
  }
  const Heads in_scores(scores), in_value(value), in_out(out), in_dout(dout);
  const Tensor in_lse = lse.contiguous();
  const Mask device_mask = kernel_mask(mask);
  Tensor sink_terms;  // (batch, nheads, seqlen_q)
  if (is_given(mask.sink)) sink_terms = at::zeros_like(in_lse);
  const SoftmaxMatmulBackwardParams params = {
      problem_of(scores, value, device_mask, scale),
      in_scores.operand(),
      in_value.operand(),
      in_out.operand(),
      in_dout.operand(),
      const_data<float>(in_lse),
      dscores.mutable_data_ptr(),
      dvalue.mutable_data_ptr(),
      sink_terms.defined() ? mutable_data<float>(sink_terms) : nullptr};
  const cudaStream_t stream = current_stream();
  launch_softmax_matmul_dscores(params, stream);
  launch_softmax_matmul_dvalue(params, stream);
  if (sink_terms.defined()) dsink.copy_(sink_terms.sum(at::IntArrayRef({0, 2})));
  return {dscores, dvalue, dsink};
}
constexpr auto softmax_matmul_backward_cuda = mask_op<softmax_matmul_grads_cuda>;
#endif

struct SoftmaxMatmulFunction : torch::autograd::Function<SoftmaxMatmulFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& scores, const Tensor& value,
                               const OptionalTensor& leftpad, bool causal, double scale,
                               const OptionalTensor& key_start, const OptionalTensor& key_end,
                               std::optional<int64_t> window, std::optional<double> softcap,
                               const OptionalTensor& sink) {
    auto [out, lse] = call_softmax_matmul_forward.below(scores, value, leftpad, causal, scale,
                                                        key_start, key_end, window, softcap, sink);
    save_with_mask(ctx, {scores, value, out, lse},
                   {leftpad, causal, key_start, key_end, window, softcap, sink});
    ctx->saved_data["scale"] = scale;
    return outputs_of(ctx, {out, lse});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(10);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const Mask mask = saved_mask(ctx, saved);
    auto [dscores, dvalue, dsink] = call_softmax_matmul_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], mask.leftpad, mask.causal,
        ctx->saved_data["scale"].toDouble(), mask.key_start, mask.key_end, mask.window,
        mask.softcap, mask.sink);
    all[0] = dscores, all[1] = dvalue;
    all[9] = if_wanted(is_given(mask.sink), dsink);
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
