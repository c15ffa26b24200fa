// causal_conv1d convolves each channel of a sequence with a short filter of its own:
//   y[b, c, t] = act(bias[c] + sum over j < width of weight[c, width - 1 - j] * x[b, c, t - j])
//   x and y (batch, channels, seqlen), weight (channels, width) with a width of 2 to 4
// Position t sees the positions from key_start[b, t] on. initial_state (batch, channels, width - 1)
// has the values in front of position 0, which are zeros otherwise. Both directions compute in fp32
// (fp64 for fp64 inputs) and round each result once. y and dx have the memory order of a projection
// (batch, seqlen, channels).
// Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "core/dispatch.h"
#include "core/linear_common.h"
#include "ops/causal_conv1d/causal_conv1d_cpu.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "layers/norm_linear.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#endif

namespace torchweld::causal_conv1d_op {
namespace {

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 4>;

bool is_silu(const char* op, c10::string_view activation) {
  const bool silu = activation == "silu";
  TW_CHECK(silu || activation == "none", op, "activation must be none or silu, but got '",
           activation, "'");
  return silu;
}

void causal_conv1d_checks(const char* op, const Tensor& x, const Tensor& weight,
                          const OptionalTensor& bias, const OptionalTensor& initial_state,
                          c10::string_view activation, const OptionalTensor& key_start) {
  check_floating(op, "x", x);
  check_dim(op, "x", x, 3, "(batch, channels, seqlen)");
  const auto batch = x.sym_size(0), channels = x.sym_size(1);
  check_like(op, "weight", weight, "x", x);
  const bool fits = weight.dim() == 2 && weight.sym_size(0) == channels &&
                    weight.sym_size(1) >= 2 && weight.sym_size(1) <= kTaps;
  TW_CHECK(fits, op, "weight must be (channels, width) with channels ", channels,
           " and a width of 2 to 4, but got ", describe(weight),
           weight.dim() == 3 ? "; use weight.squeeze(1)" : "");
  check_vector(op, "bias", bias, channels, "(channels,)", x);
  is_silu(op, activation);
  if (is_given(key_start)) {
    check_device(op, "key_start", *key_start, "x", x);
    check_dtype(op, "key_start", *key_start, at::kInt);
    check_shape(op, "key_start", *key_start, {batch, x.sym_size(2)}, "(batch, seqlen)");
  }
  if (!is_given(initial_state)) return;
  TW_CHECK(!is_given(key_start), op,
           "initial_state must be given without key_start, but got both; the values of "
           "initial_state lie in front of every document");
  check_like(op, "initial_state", *initial_state, "x", x);
  check_shape(op, "initial_state", *initial_state, {batch, channels, weight.sym_size(1) - 1},
              "(batch, channels, width - 1)");
}

// Allocates a tensor with the shape of x, in the memory order of a projection.
Tensor empty_by_position(const Tensor& x) {
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(1)}, x.options())
      .transpose(1, 2);
}

Tensor causal_conv1d_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& initial_state, c10::string_view activation,
                          const OptionalTensor& key_start) {
  causal_conv1d_checks("causal_conv1d", x, weight, bias, initial_state, activation, key_start);
  return empty_by_position(x);
}
TW_OP(causal_conv1d);

Grads causal_conv1d_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& initial_state,
                                  c10::string_view activation, const OptionalTensor& key_start,
                                  Wanted output_mask) {
  const char* op = "causal_conv1d_backward";
  causal_conv1d_checks(op, x, weight, bias, initial_state, activation, key_start);
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, x.sym_sizes(), "x's shape");
  const auto none = [&] { return at::empty({0}, x.options()); };
  return {output_mask[0] ? empty_by_position(x) : none(),
          output_mask[1] ? at::empty_symint(weight.sym_sizes(), x.options()) : none(),
          empty_vector_grad(x, x.sym_size(1), output_mask[2] && is_given(bias)),
          output_mask[3] && is_given(initial_state)
              ? at::empty_symint(initial_state->sym_sizes(), x.options())
              : none()};
}
TW_OP(causal_conv1d_backward);

// Returns t (batch, channels, seqlen) as (batch, seqlen, channels) whose channels have stride 1.
Tensor by_position(const Tensor& t) {
  const Tensor rows = t.transpose(1, 2);
  return rows.stride(2) == 1 || rows.size(2) == 1 ? rows : rows.contiguous();
}

OptionalTensor contiguous(const OptionalTensor& t) {
  return is_given(t) ? OptionalTensor(t->contiguous()) : std::nullopt;
}

template <typename T>
const T* data_or_null(const OptionalTensor& t) {
  return is_given(t) ? t->const_data_ptr<T>() : nullptr;
}

// The operands of a call on the CPU.
template <typename T, typename A>
struct CpuOperands {
  Tensor x, weights, bias;
  OptionalTensor key_start, state;
  CpuConv<T> conv;

  CpuOperands(const char* op, const Tensor& x_given, const Tensor& weight,
              const OptionalTensor& bias_given, const OptionalTensor& initial_state,
              c10::string_view activation, const OptionalTensor& starts)
      : x(by_position(x_given)),
        weights(weight.to(c10::CppTypeToScalarType<A>::value).flip(1).t().contiguous()),
        bias(is_given(bias_given) ? bias_given->to(weights.scalar_type()).contiguous()
                                  : at::zeros({weight.size(0)}, weights.options())),
        key_start(contiguous(starts)),
        state(is_given(initial_state) ? OptionalTensor(by_position(*initial_state).contiguous())
                                      : std::nullopt),
        conv{x.const_data_ptr<T>(),
             {x.stride(0), x.stride(1)},
             data_or_null<T>(state),
             data_or_null<int32_t>(key_start),
             x.size(0),
             x.size(1),
             x.size(2),
             weight.size(1),
             is_silu(op, activation)} {}
};

template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

Tensor causal_conv1d_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& initial_state, c10::string_view activation,
                         const OptionalTensor& key_start) {
  static constexpr char op[] = "causal_conv1d";
  const Tensor y = causal_conv1d_meta(x, weight, bias, initial_state, activation, key_start);
  if (y.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using A = AccOf<scalar_t>;
    const CpuOperands<scalar_t, A> in(op, x, weight, bias, initial_state, activation, key_start);
    convolve_cpu(in.conv, in.weights.template const_data_ptr<A>(),
                 in.bias.template const_data_ptr<A>(), y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

Grads causal_conv1d_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& initial_state,
                                 c10::string_view activation, const OptionalTensor& key_start,
                                 Wanted output_mask) {
  static constexpr char op[] = "causal_conv1d_backward";
  auto [dx, dweight, dbias, dstate] = causal_conv1d_backward_meta(
      dy, x, weight, bias, initial_state, activation, key_start, output_mask);
  if (x.numel() == 0) {
    for (const Tensor& t : {dweight, dbias, dstate}) t.zero_();
    return {dx, dweight, dbias, dstate};
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using A = AccOf<scalar_t>;
    const CpuOperands<scalar_t, A> in(op, x, weight, bias, initial_state, activation, key_start);
    const CpuConv<scalar_t>& conv = in.conv;
    const Tensor rows = by_position(dy);
    const CpuConvTasks tasks(conv);
    const Tensor sums = at::empty({conv.batch * tasks.chunks, conv.width + 1, conv.channels},
                                  in.weights.options().dtype(at::kDouble));
    const bool wants_state = dstate.numel() > 0;
    const Tensor state = wants_state ? at::empty_like(*in.state) : Tensor();
    convolve_backward_cpu<scalar_t, A>(
        conv, rows.const_data_ptr<scalar_t>(), {rows.stride(0), rows.stride(1)},
        in.weights.template const_data_ptr<A>(), in.bias.template const_data_ptr<A>(),
        {output_mask[0] ? dx.mutable_data_ptr<scalar_t>() : nullptr,
         wants_state ? state.mutable_data_ptr<scalar_t>() : nullptr,
         sums.mutable_data_ptr<double>()});
    if (wants_state) dstate.copy_(state.transpose(1, 2));
    const Tensor total = sums.sum(0);
    if (dweight.numel() > 0) dweight.copy_(total.narrow(0, 0, conv.width).flip(0).t());
    if (dbias.numel() > 0) dbias.copy_(total[conv.width]);
  });
  return {dx, dweight, dbias, dstate};
}

#ifdef TORCHWELD_CUDA
// The operands of a call on a GPU.
struct CudaOperands {
  Tensor x, weight;
  Vector bias, key_start;
  OptionalTensor state;
  CausalConvParams params;

  CudaOperands(const char* op, const Tensor& x_given, const Tensor& weight_given,
               const OptionalTensor& bias_given, const OptionalTensor& initial_state,
               c10::string_view activation, const OptionalTensor& starts)
      : x(by_position(x_given)),
        weight(weight_given.contiguous()),
        bias(bias_given),
        key_start(starts),
        state(initial_state),
        params{rows_of(x),
               const_data<void>(weight),
               bias.data(),
               {},
               key_start.data<int32_t>(),
               x.size(0),
               x.size(1),
               x.size(2),
               static_cast<int>(weight.size(1)),
               is_silu(op, activation),
               dtype_of(x)} {
    if (is_given(state)) {
      params.state = {const_data<void>(*state), state->stride(0), state->stride(1),
                      state->stride(2)};
    }
  }

  static ConvRows<const void*> rows_of(const Tensor& t) {
    // The stride of a dim of size 1 is never used, so it must not influence the alignment check.
    const auto stride = [&](int d) { return t.size(d) == 1 ? 0 : t.stride(d); };
    return {const_data<void>(t), stride(0), stride(1)};
  }
};

Tensor causal_conv1d_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& initial_state, c10::string_view activation,
                          const OptionalTensor& key_start) {
  const Tensor y = causal_conv1d_meta(x, weight, bias, initial_state, activation, key_start);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  const CudaOperands in("causal_conv1d", x, weight, bias, initial_state, activation, key_start);
  launch_causal_conv(in.params, mutable_data<void>(y), current_stream());
  return y;
}

Grads causal_conv1d_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& initial_state,
                                  c10::string_view activation, const OptionalTensor& key_start,
                                  Wanted output_mask) {
  const char* op = "causal_conv1d_backward";
  auto [dx, dweight, dbias, dstate] = causal_conv1d_backward_meta(
      dy, x, weight, bias, initial_state, activation, key_start, output_mask);
  const OnDevice on(x.device());
  if (x.numel() == 0) {
    for (const Tensor& t : {dweight, dbias, dstate}) t.zero_();
    return {dx, dweight, dbias, dstate};
  }
  const CudaOperands in(op, x, weight, bias, initial_state, activation, key_start);
  const Tensor rows = by_position(dy);
  const bool sums = dweight.numel() > 0 || dbias.numel() > 0;
  const Tensor partials = sums ? empty_floats(causal_conv_partials(in.params), x) : Tensor();
  CausalConvBackwardParams params = {in.params,
                                     CudaOperands::rows_of(rows),
                                     data_if_wanted(dx),
                                     data_if_wanted(dweight),
                                     data_if_wanted(dbias),
                                     {},
                                     data_if_wanted<float>(partials)};
  if (dstate.numel() > 0) {
    params.dstate = {mutable_data<void>(dstate), dstate.stride(0), dstate.stride(1),
                     dstate.stride(2)};
  }
  launch_causal_conv_backward(params, current_stream());
  return {dx, dweight, dbias, dstate};
}
#endif

struct CausalConv1dFunction : torch::autograd::Function<CausalConv1dFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& initial_state,
                        c10::string_view activation, const OptionalTensor& key_start) {
    ctx->save_for_backward(
        {x, weight, or_undefined(bias), or_undefined(initial_state), or_undefined(key_start)});
    ctx->saved_data["activation"] = activation;
    return call_causal_conv1d.below(x, weight, bias, initial_state, activation, key_start);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const Wanted wanted = {asked.next(), asked.next(), asked.next(saved[2].defined()),
                           asked.next(saved[3].defined())};
    auto [dx, dweight, dbias, dstate] = call_causal_conv1d_backward(
        grads[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]),
        ctx->saved_data["activation"].toStringRef(), optional(saved[4]), wanted);
    return {if_wanted(wanted[0], dx),
            if_wanted(wanted[1], dweight),
            if_wanted(wanted[2], dbias),
            if_wanted(wanted[3], dstate),
            Tensor(),
            Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m,
            "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
            "*, str activation=\"none\", Tensor? key_start=None) -> Tensor",
            TW_KERNELS(causal_conv1d),
            recorded_by<CausalConv1dFunction>(call_causal_conv1d, causal_conv1d_checks));
  define_op(m,
            "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? "
            "initial_state=None, *, str activation=\"none\", Tensor? key_start=None, "
            "bool[4] output_mask) -> "
            "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
            TW_KERNELS(causal_conv1d_backward), no_gradient_function());
  define_autocast(m, call_causal_conv1d);
}

}  // namespace
}  // namespace torchweld::causal_conv1d_op
