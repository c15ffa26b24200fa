// int4_linear_repacked:  int4_linear with a weight from int4_repack
//   x (..., K), packed int32 (ceil(N/16), ceil(K/64), 128), packed_scale (ceil(N/16), groups, 16),
//   packed_zero int32 (ceil(N/16), groups, 2), bias (N,), y (..., N) with N = out_features
// Gradient:              dx = dy @ W; only x has a gradient, as in int4_linear
#include "core/dispatch.h"
#include "int4/checks.h"
#include "int4/cpu/linear.h"

#ifdef TORCHWELD_CUDA
#include "int4/cuda.h"
#endif

namespace torchweld::repacked_op {
namespace {

// Checks that the shapes of the three tensors fit N and K, and that the tensors are on the device
// of `like`.
void check_repacked(const char* op, const Tensor& packed, const Tensor& packed_scale,
                    const Tensor& packed_zero, const c10::SymInt& n, const c10::SymInt& k,
                    const char* like_name, const Tensor& like) {
  check_words(op, "packed", packed, 3, "(ceil(N/16), ceil(K/64), 128)", like_name, like);
  check_like(op, "packed_scale", packed_scale, like_name, like);
  check_dim(op, "packed_scale", packed_scale, 3, "(ceil(N/16), groups, 16)");
  check_words(op, "packed_zero", packed_zero, 3, "(ceil(N/16), groups, 2)", like_name, like);
  const c10::SymInt tiles = ceil_div(n, kInt4TileRows), groups = packed_scale.sym_size(1);
  check_shape(op, "packed", packed, {tiles, ceil_div(k, kInt4ChunkK), kInt4ChunkWords},
              "(ceil(N/16), ceil(K/64), 128)");
  check_shape(op, "packed_scale", packed_scale, {tiles, groups, kInt4TileRows},
              "(ceil(N/16), groups, 16)");
  TW_CHECK(int4_groups_fit(k, groups), op,
           "packed_scale must be (ceil(N/16), groups, 16) where K = ", k,
           " divides into groups of a multiple of 8, but got ", describe(packed_scale),
           "; use int4_repack");
  check_shape(op, "packed_zero", packed_zero, {tiles, groups, 2}, "(ceil(N/16), groups, 2)");
}

Tensor int4_linear_repacked_meta(const Tensor& x, const Tensor& packed, const Tensor& packed_scale,
                                 const Tensor& packed_zero, const OptionalTensor& bias,
                                 c10::SymInt out_features) {
  const char* op = "int4_linear_repacked";
  check_floating(op, "x", x);
  check_min_dim(op, "x", x, 1, "(..., K)");
  TW_CHECK(out_features >= 0, op, "out_features must be at least 0, but got ", out_features);
  check_repacked(op, packed, packed_scale, packed_zero, out_features, x.sym_size(-1), "x", x);
  check_vector(op, "bias", bias, out_features, "(N,)", x);
  return empty_result(x, with_last(x, out_features));
}
TW_OP(int4_linear_repacked);

Tensor int4_linear_repacked_backward_meta(const Tensor& dy, const Tensor& packed,
                                          const Tensor& packed_scale, const Tensor& packed_zero,
                                          c10::SymInt in_features) {
  const char* op = "int4_linear_repacked_backward";
  check_floating(op, "dy", dy);
  check_min_dim(op, "dy", dy, 1, "(..., N)");
  TW_CHECK(in_features >= 0, op, "in_features must be at least 0, but got ", in_features);
  check_repacked(op, packed, packed_scale, packed_zero, dy.sym_size(-1), in_features, "dy", dy);
  return at::empty_symint(with_last(dy, in_features), dy.options());
}
TW_OP(int4_linear_repacked_backward);

RepackedInt4 repacked(const Int4Shape& shape, const Tensor& packed, const Tensor& packed_scale,
                      const Tensor& packed_zero) {
  return {shape, packed.contiguous(), packed_scale.contiguous(), packed_zero.contiguous()};
}

Tensor int4_linear_repacked_cpu(const Tensor& x, const Tensor& packed, const Tensor& packed_scale,
                                const Tensor& packed_zero, const OptionalTensor& bias,
                                int64_t out_features) {
  Tensor y = int4_linear_repacked_meta(x, packed, packed_scale, packed_zero, bias, out_features);
  if (y.numel() == 0) return y;
  const Int4Shape shape = {out_features, x.size(-1), packed_scale.size(1)};
  int4_linear_into(as_matrix(y), as_matrix(x), repacked(shape, packed, packed_scale, packed_zero),
                   bias);
  return y;
}

Tensor int4_linear_repacked_backward_cpu(const Tensor& dy, const Tensor& packed,
                                         const Tensor& packed_scale, const Tensor& packed_zero,
                                         int64_t in_features) {
  Tensor dx =
      int4_linear_repacked_backward_meta(dy, packed, packed_scale, packed_zero, in_features);
  if (dx.numel() == 0) return dx;
  const Int4Shape shape = {dy.size(-1), in_features, packed_scale.size(1)};
  int4_linear_backward_into(as_matrix(dx), as_matrix(dy),
                            repacked(shape, packed, packed_scale, packed_zero));
  return dx;
}

#ifdef TORCHWELD_CUDA
Tensor int4_linear_repacked_cuda(const Tensor& x, const Tensor& packed, const Tensor& packed_scale,
                                 const Tensor& packed_zero, const OptionalTensor& bias,
                                 int64_t out_features) {
  Tensor y = int4_linear_repacked_meta(x, packed, packed_scale, packed_zero, bias, out_features);
  if (y.numel() == 0) return y;
  const OnDevice on(x.device());
  const Int4Shape shape = {out_features, x.size(-1), packed_scale.size(1)};
  int4_matmul_into(as_matrix(y), as_matrix(x), {shape, packed, packed_scale, packed_zero}, bias);
  return y;
}

Tensor int4_linear_repacked_backward_cuda(const Tensor& dy, const Tensor& packed,
                                          const Tensor& packed_scale, const Tensor& packed_zero,
                                          int64_t in_features) {
  Tensor dx =
      int4_linear_repacked_backward_meta(dy, packed, packed_scale, packed_zero, in_features);
  if (dx.numel() == 0) return dx;
  const OnDevice on(dy.device());
  const Int4Shape shape = {dy.size(-1), in_features, packed_scale.size(1)};
  int4_matmul_backward_into(as_matrix(dx), as_matrix(dy),
                            {shape, packed, packed_scale, packed_zero});
  return dx;
}
#endif

struct Int4LinearRepackedFunction : torch::autograd::Function<Int4LinearRepackedFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& packed,
                        const Tensor& packed_scale, const Tensor& packed_zero,
                        const OptionalTensor& bias, const c10::SymInt& out_features) {
    Tensor y =
        call_int4_linear_repacked.below(x, packed, packed_scale, packed_zero, bias, out_features);
    ctx->save_for_backward({packed, packed_scale, packed_zero});
    ctx->saved_data["in_features"] = x.sym_size(-1);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list dx(6);
    dx[0] = call_int4_linear_repacked_backward(grads[0], saved[0], saved[1], saved[2],
                                               ctx->saved_data["in_features"].toSymInt());
    return dx;
  }
};

void int4_linear_repacked_frozen(const char* op, const Tensor& x, const Tensor& packed,
                                 const Tensor& packed_scale, const Tensor& packed_zero,
                                 const OptionalTensor& bias, const c10::SymInt& out_features) {
  check_int4_frozen(op, "packed_scale", packed_scale);
  check_int4_frozen(op, "bias", bias);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(
      m,
      "int4_linear_repacked(Tensor x, Tensor packed, Tensor packed_scale, Tensor packed_zero, "
      "Tensor? bias=None, *, SymInt out_features) -> Tensor",
      TW_KERNELS(int4_linear_repacked),
      recorded_by<Int4LinearRepackedFunction>(call_int4_linear_repacked,
                                              int4_linear_repacked_frozen));
  define_op(m,
            "int4_linear_repacked_backward(Tensor dy, Tensor packed, Tensor packed_scale, "
            "Tensor packed_zero, *, SymInt in_features) -> Tensor dx",
            TW_KERNELS(int4_linear_repacked_backward), no_gradient_function());
  define_autocast(m, call_int4_linear_repacked);
}

}  // namespace
}  // namespace torchweld::repacked_op
