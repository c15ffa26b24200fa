// int4_linear:  y = x @ W^T + bias, W = scale * (code - zero)
//   x (..., K), qweight int32 (N, K/8), scale (N, groups), zero int32 (N, ceil(groups/8)),
//   bias (N,), y (..., N); int4_pack packs the codes and zeros
// Gradient:     dx = dy @ W. Only x has a gradient: codes and zeros are integers, and the scale and
//               bias of a quantised weight are frozen.
//
// On CUDA, each call of int4_linear repacks the weight. int4_linear_repacked needs a weight that is
// already repacked.
#include "core/dispatch.h"
#include "int4/checks.h"
#include "int4/cpu/linear.h"

#ifdef TORCHWELD_CUDA
#include "int4/cuda.h"
#endif

namespace torchweld::int4_linear_op {
namespace {

Tensor int4_linear_meta(const Tensor& x, const Tensor& qweight, const Tensor& scale,
                        const Tensor& zero, const OptionalTensor& bias) {
  const char* op = "int4_linear";
  check_floating(op, "x", x);
  check_min_dim(op, "x", x, 1, "(..., K)");
  const c10::SymInt k = x.sym_size(-1);
  TW_CHECK(k % kInt4Unit == 0, op, "x must be (..., K) with K a multiple of 8, but got ",
           describe(x), kInt4Rule);
  check_words(op, "qweight", qweight, 2, "(N, K/8)", "x", x);
  TW_CHECK(qweight.sym_size(1) * kInt4Unit == k, op, "qweight must be (N, K/8) with K = ", k,
           ", but got qweight ", shape_text(qweight.sym_sizes()), " beside scale ",
           shape_text(scale.sym_sizes()), " and zero ", shape_text(zero.sym_sizes()), kInt4Rule);
  check_int4_weight(op, qweight, scale, zero, "x", x);
  check_vector(op, "bias", bias, qweight.sym_size(0), "(N,)", x);
  return empty_result(x, with_last(x, qweight.sym_size(0)));
}
TW_OP(int4_linear);

Tensor int4_linear_backward_meta(const Tensor& dy, const Tensor& qweight, const Tensor& scale,
                                 const Tensor& zero) {
  const char* op = "int4_linear_backward";
  check_floating(op, "dy", dy);
  check_min_dim(op, "dy", dy, 1, "(..., N)");
  check_int4_weight(op, qweight, scale, zero, "dy", dy);
  check_shape(op, "dy", dy, with_last(dy, qweight.sym_size(0)), "(..., N)");
  return at::empty_symint(with_last(dy, qweight.sym_size(1) * kInt4Unit), dy.options());
}
TW_OP(int4_linear_backward);

PortableInt4 portable(const Tensor& qweight, const Tensor& scale, const Tensor& zero) {
  return {int4_shape(qweight, scale), qweight.contiguous(), scale.contiguous(), zero.contiguous()};
}

Tensor int4_linear_cpu(const Tensor& x, const Tensor& qweight, const Tensor& scale,
                       const Tensor& zero, const OptionalTensor& bias) {
  Tensor y = int4_linear_meta(x, qweight, scale, zero, bias);
  if (y.numel() == 0) return y;
  int4_linear_into(as_matrix(y), as_matrix(x), portable(qweight, scale, zero), bias);
  return y;
}

Tensor int4_linear_backward_cpu(const Tensor& dy, const Tensor& qweight, const Tensor& scale,
                                const Tensor& zero) {
  Tensor dx = int4_linear_backward_meta(dy, qweight, scale, zero);
  if (dx.numel() == 0) return dx;
  int4_linear_backward_into(as_matrix(dx), as_matrix(dy), portable(qweight, scale, zero));
  return dx;
}

#ifdef TORCHWELD_CUDA
RepackedWeight repack(const Tensor& qweight, const Tensor& scale, const Tensor& zero) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&)>(
          "int4_repack");
  auto [packed, packed_scale, packed_zero] = op.call(qweight, scale, zero);
  return {int4_shape(qweight, scale), packed, packed_scale, packed_zero};
}

Tensor int4_linear_cuda(const Tensor& x, const Tensor& qweight, const Tensor& scale,
                        const Tensor& zero, const OptionalTensor& bias) {
  Tensor y = int4_linear_meta(x, qweight, scale, zero, bias);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  int4_matmul_into(as_matrix(y), as_matrix(x), repack(qweight, scale, zero), bias);
  return y;
}

Tensor int4_linear_backward_cuda(const Tensor& dy, const Tensor& qweight, const Tensor& scale,
                                 const Tensor& zero) {
  Tensor dx = int4_linear_backward_meta(dy, qweight, scale, zero);
  if (dx.numel() == 0) return dx;
  const OnDevice on(dy.device());
  int4_matmul_backward_into(as_matrix(dx), as_matrix(dy), repack(qweight, scale, zero));
  return dx;
}
#endif

struct Int4LinearFunction : torch::autograd::Function<Int4LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& qweight,
                        const Tensor& scale, const Tensor& zero, const OptionalTensor& bias) {
    ctx->save_for_backward({qweight, scale, zero});
    return call_int4_linear.below(x, qweight, scale, zero, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {call_int4_linear_backward(grads[0], saved[0], saved[1], saved[2]), Tensor(), Tensor(),
            Tensor(), Tensor()};
  }
};

void int4_linear_frozen(const char* op, const Tensor& x, const Tensor& qweight, const Tensor& scale,
                        const Tensor& zero, const OptionalTensor& bias) {
  check_int4_frozen(op, "scale", scale);
  check_int4_frozen(op, "bias", bias);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(
      m,
      "int4_linear(Tensor x, Tensor qweight, Tensor scale, Tensor zero, Tensor? bias=None) -> "
      "Tensor",
      TW_KERNELS(int4_linear),
      recorded_by<Int4LinearFunction>(call_int4_linear, int4_linear_frozen));
  define_op(
      m, "int4_linear_backward(Tensor dy, Tensor qweight, Tensor scale, Tensor zero) -> Tensor dx",
      TW_KERNELS(int4_linear_backward), no_gradient_function());
  define_autocast(m, call_int4_linear);
}

}  // namespace
}  // namespace torchweld::int4_linear_op
