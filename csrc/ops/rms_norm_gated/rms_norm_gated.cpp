// rms_norm_gated computes an RMSNorm whose rows are multiplied by silu(gate):
//   y = r * rstd * weight * silu(gate),  r = x
//   gate_first:  y = r * rstd * weight,  r = x * silu(gate)
//   rstd = 1 / sqrt(mean(r * r) + eps)
//   x, gate, y (..., n), weight (n,), which may be fp32 beside 16-bit rows
// Each result is rounded once. rms_norm_gated_forward also returns rstd (...), in fp32 or fp64.
#include <limits>

#include "core/dispatch.h"
#include "layers/norm_op.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#include "norm/gated.h"
#endif

namespace torchweld::rms_norm_gated_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;

void rms_norm_gated_checks(const char* op, const Tensor& x, const Tensor& gate,
                           const OptionalTensor& weight, double eps, bool gate_first) {
  check_floating(op, "x", x);
  check_min_dim(op, "x", x, 1, "(..., n)");
  check_like(op, "gate", gate, "x", x);
  check_shape(op, "gate", gate, x.sym_sizes(), "x's shape");
  check_norm_weight(op, "x", x, weight, 0);
  check_eps(op, eps);
}

Tensor rms_norm_gated_meta(const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
                           double eps, bool gate_first) {
  rms_norm_gated_checks("rms_norm_gated", x, gate, weight, eps, gate_first);
  return empty_result(x, x.sym_sizes());
}
TW_OP(rms_norm_gated);

Forward rms_norm_gated_forward_meta(const Tensor& x, const Tensor& gate,
                                    const OptionalTensor& weight, double eps, bool gate_first) {
  rms_norm_gated_checks("rms_norm_gated_forward", x, gate, weight, eps, gate_first);
  return {empty_result(x, x.sym_sizes()),
          at::empty_symint(without_last(x), x.options().dtype(acc_dtype(x)))};
}
TW_OP(rms_norm_gated_forward);

Grads rms_norm_gated_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& gate,
                                   const OptionalTensor& weight, const Tensor& rstd,
                                   bool gate_first, Wanted output_mask) {
  const char* op = "rms_norm_gated_backward";
  rms_norm_gated_checks(op, x, gate, weight, /*eps=*/0, gate_first);
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, x.sym_sizes(), "x's shape");
  check_statistic(op, "rstd", rstd, x);
  return {empty_input_grad(x, output_mask[0]), empty_input_grad(gate, output_mask[1]),
          empty_vector_grad(vectors_like(x, weight), x.sym_size(-1),
                            output_mask[2] && is_given(weight))};
}
TW_OP(rms_norm_gated_backward);

NormInputs inputs(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps,
                  bool gate_first) {
  return {/*centred=*/false, x, std::nullopt, weight, std::nullopt, eps, 0, {}, gate,
          gate_first};
}

NormUpstream upstream(const Tensor& dy, const Tensor& x, const Tensor& gate,
                      const OptionalTensor& weight, const Tensor& rstd, bool gate_first) {
  return {/*centred=*/false, dy, x,    weight,    {}, rstd,
          std::nullopt,      0,  gate, gate_first};
}

#ifdef TORCHWELD_CUDA
void norm_gated_forward_cuda(const NormInputs& in, const NormResults& out) {
  if (in.x.numel() == 0) {
    if (out.rstd.defined()) out.rstd.fill_(std::numeric_limits<double>::quiet_NaN());
    return;
  }
  const OnDevice on(in.x.device());
  const Rows x(in.x), gate(*in.gate);
  const Vector scale(in.weight);
  launch_norm_gated({const_data<void>(x.tensor), const_data<void>(gate.tensor), scale.data(),
                     mutable_data<void>(out.y), data_if_wanted<float>(out.rstd), x.rows, x.n,
                     x.row_stride, gate.row_stride, static_cast<float>(in.eps), in.gate_first,
                     dtype_of(in.x), dtype_of(vectors_like(in.x, in.weight))},
                    current_stream());
}

void norm_gated_backward_cuda(const NormUpstream& in, const NormGradients& out) {
  if (in.x.numel() == 0) {
    out.dweight.zero_();
    return;
  }
  const OnDevice on(in.x.device());
  const Rows dy(in.dy), x(in.x), gate(*in.gate);
  const Vector scale(in.weight), rstd(in.rstd);
  NormGatedBackwardParams params = {const_data<void>(dy.tensor),
                                    const_data<void>(x.tensor),
                                    const_data<void>(gate.tensor),
                                    scale.data(),
                                    rstd.data<float>(),
                                    data_if_wanted(out.dx),
                                    data_if_wanted(out.dgate),
                                    data_if_wanted(out.dweight),
                                    nullptr,
                                    x.rows,
                                    x.n,
                                    dy.row_stride,
                                    x.row_stride,
                                    gate.row_stride,
                                    in.gate_first,
                                    dtype_of(in.x),
                                    dtype_of(vectors_like(in.x, in.weight))};
  const Tensor partials =
      params.dscale != nullptr ? empty_floats(norm_gated_partials(params), in.x) : Tensor();
  params.partials = data_if_wanted<float>(partials);
  launch_norm_gated_backward(params, current_stream());
}
#endif

template <NormForwardEngine engine>
Tensor run(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps,
           bool gate_first) {
  const Tensor y = rms_norm_gated_meta(x, gate, weight, eps, gate_first);
  engine(inputs(x, gate, weight, eps, gate_first), {y});
  return y;
}

template <NormForwardEngine engine>
Forward run_forward(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps,
                    bool gate_first) {
  auto [y, rstd] = rms_norm_gated_forward_meta(x, gate, weight, eps, gate_first);
  engine(inputs(x, gate, weight, eps, gate_first), {y, {}, {}, rstd});
  return {y, rstd};
}

template <NormBackwardEngine engine>
Grads run_backward(const Tensor& dy, const Tensor& x, const Tensor& gate,
                   const OptionalTensor& weight, const Tensor& rstd, bool gate_first,
                   Wanted output_mask) {
  auto [dx, dgate, dweight] =
      rms_norm_gated_backward_meta(dy, x, gate, weight, rstd, gate_first, output_mask);
  const Tensor dbias = at::empty({0}, x.options());
  engine(upstream(dy, x, gate, weight, rstd, gate_first), {dx, dweight, dbias, dgate});
  return {dx, dgate, dweight};
}

struct RmsNormGatedFunction : torch::autograd::Function<RmsNormGatedFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& gate,
                               const OptionalTensor& weight, double eps, bool gate_first) {
    auto [y, rstd] = call_rms_norm_gated_forward.below(x, gate, weight, eps, gate_first);
    ctx->save_for_backward({x, gate, or_undefined(weight), rstd});
    ctx->saved_data["gate_first"] = gate_first;
    return outputs_of(ctx, {y, rstd});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const Wanted wanted = {asked.next(), asked.next(), asked.next(saved[2].defined())};
    auto [dx, dgate, dweight] =
        call_rms_norm_gated_backward(grads[0], saved[0], saved[1], optional(saved[2]), saved[3],
                                     ctx->saved_data["gate_first"].toBool(), wanted);
    return {if_wanted(wanted[0], dx), if_wanted(wanted[1], dgate), if_wanted(wanted[2], dweight),
            Tensor(), Tensor()};
  }
};

// Under autocast, the op computes in the dtype that x * gate has in torch. An fp32 weight stays in
// fp32.
template <at::DeviceType device>
Tensor rms_norm_gated_autocast(const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
                               double eps, bool gate_first) {
  Autocast<device> cast;
  cast.dtype = c10::promoteTypes(x.scalar_type(), gate.scalar_type());
  const Tensor rows = cast(x);
  Autocast<device> cast_vector;
  const bool keeps = is_given(weight) && weight->scalar_type() == acc_dtype(rows);
  cast_vector.dtype = keeps ? weight->scalar_type() : rows.scalar_type();
  return call_rms_norm_gated(rows, cast(gate), cast_vector(weight), eps, gate_first);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string arguments =
      "(Tensor x, Tensor gate, Tensor? weight=None, *, float eps=1e-6, bool gate_first=False)";
  define_op(
      m, "rms_norm_gated" + arguments + " -> Tensor",
      Kernels{torch::CppFunction(rms_norm_gated_meta), torch::CppFunction(run<norm_forward_cpu>),
              TW_CUDA_KERNEL(run<norm_gated_forward_cuda>)},
      recorded_by<RmsNormGatedFunction>(call_rms_norm_gated, rms_norm_gated_checks));
  define_op(m, "rms_norm_gated_forward" + arguments + " -> (Tensor y, Tensor rstd)",
            Kernels{torch::CppFunction(rms_norm_gated_forward_meta),
                    torch::CppFunction(run_forward<norm_forward_cpu>),
                    TW_CUDA_KERNEL(run_forward<norm_gated_forward_cuda>)},
            recorded_by<RmsNormGatedFunction>(call_rms_norm_gated_forward));
  define_op(m,
            "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor? weight, "
            "Tensor rstd, *, bool gate_first=False, bool[3] output_mask) -> "
            "(Tensor dx, Tensor dgate, Tensor dweight)",
            Kernels{torch::CppFunction(rms_norm_gated_backward_meta),
                    torch::CppFunction(run_backward<norm_backward_cpu>),
                    TW_CUDA_KERNEL(run_backward<norm_gated_backward_cuda>)},
            no_gradient_function());
  m.impl("rms_norm_gated",
         torch::dispatch(c10::DispatchKey::AutocastCPU, rms_norm_gated_autocast<at::kCPU>));
  m.impl("rms_norm_gated",
         torch::dispatch(c10::DispatchKey::AutocastCUDA, rms_norm_gated_autocast<at::kCUDA>));
}

}  // namespace
}  // namespace torchweld::rms_norm_gated_op
