// Rotary position embedding of q and k: out = x * cos + rotate(x) * sin.
//
// x stands for the first rotary_dim values of a head of q (batch, nheads, seqlen, head_dim) or of k
// (batch, nheads_k, seqlen, head_dim). The op copies the other values of the head unchanged. cos
// and sin are (batch or 1, seqlen, rotary_dim) or (seqlen, rotary_dim). rotate maps each pair (a,
// b) to (-b, a):
//   pairs (a, b):  (x[i], x[i + rotary_dim / 2]) or, if `interleaved` is true, (x[2i], x[2i + 1])
//   out_a = a cos_a - b sin_a,  out_b = b cos_b + a sin_b
// The gradient is da = dout_a cos_a + dout_b sin_b and db = dout_b cos_b - dout_a sin_a.
//
// The kernels compute in fp32 (fp64 for fp64 inputs) and round once. empty_rotated() chooses the
// memory order of a result.
// Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <vector>

#include "core/dispatch.h"
#include "ops/rotary/rotary_cpu.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "ops/rotary/rotary.h"
#endif

namespace torchweld::rotary_op {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

void check_tables(const char* op, const Tensor& cos, const Tensor& sin, const char* q_name,
                  const Tensor& q) {
  check_device(op, "cos", cos, q_name, q);
  const auto dtype = cos.scalar_type();
  TW_CHECK(dtype == q.scalar_type() || dtype == at::kFloat, op, "cos must be ",
           q.scalar_type() == at::kFloat ? "" : dtype_name(q.scalar_type()) + " or ",
           "float32, but got ", describe(cos), "; use cos.to(", q_name, ".dtype)");
  const int64_t dim = cos.dim();
  const bool fits = (dim == 2 || dim == 3) && cos.sym_size(dim - 2) == q.sym_size(2) &&
                    (dim == 2 || cos.sym_size(0) == 1 || cos.sym_size(0) == q.sym_size(0));
  TW_CHECK(fits, op, "cos must be (seqlen, rotary_dim) or (batch or 1, seqlen, rotary_dim) with ",
           "batch ", q.sym_size(0), " and seqlen ", q.sym_size(2), ", but got ", describe(cos),
           dim == 4 ? "; use cos.squeeze(1)" : "");
  const auto rotary_dim = cos.sym_size(dim - 1);
  TW_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= q.sym_size(3), op,
           "cos must be (..., rotary_dim) with an even rotary_dim from 2 to head_dim = ",
           q.sym_size(3), ", but got ", describe(cos));
  check_like(op, "sin", sin, "cos", cos);
  check_shape(op, "sin", sin, cos.sym_sizes(), "cos's shape");
}

void check_inputs(const char* op, const char* q_name, const Tensor& q, const char* k_name,
                  const Tensor& k, const Tensor& cos, const Tensor& sin) {
  check_floating(op, q_name, q);
  check_dim(op, q_name, q, 4, "(batch, nheads, seqlen, head_dim)");
  check_like(op, k_name, k, q_name, q);
  check_dim(op, k_name, k, 4, "(batch, nheads_k, seqlen, head_dim)");
  const std::vector<c10::SymInt> sizes = {q.sym_size(0), k.sym_size(1), q.sym_size(2),
                                          q.sym_size(3)};
  check_shape(op, k_name, k, sizes, "(batch, nheads_k, seqlen, head_dim)");
  check_tables(op, cos, sin, q_name, q);
}

// Allocates a tensor with x's shape (batch, nheads, seqlen, head_dim). Its memory order is (batch,
// seqlen, nheads, head_dim), which is the order of a projection's result.
Tensor empty_by_position(const Tensor& x) {
  const std::vector<c10::SymInt> sizes = {x.sym_size(0), x.sym_size(2), x.sym_size(1),
                                          x.sym_size(3)};
  return at::empty_symint(sizes, x.options()).transpose(1, 2);
}

// Allocates the result for x: with x's strides if x is dense and its last dimension has stride 1,
// else in the order of positions.
Tensor empty_rotated(const Tensor& x) {
  if (!x.is_non_overlapping_and_dense() || x.sym_stride(3) != 1) return empty_by_position(x);
  return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
}

Pair rotary_meta(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool) {
  check_inputs("rotary", "q", q, "k", k, cos, sin);
  return {empty_rotated(q), empty_rotated(k)};
}
TW_OP(rotary);

Pair rotary_backward_meta(const Tensor& dq_out, const Tensor& dk_out, const Tensor& cos,
                          const Tensor& sin, bool, std::array<bool, 2> output_mask) {
  check_inputs("rotary_backward", "dq_out", dq_out, "dk_out", dk_out, cos, sin);
  // The gradients have the memory order of a projection's result. If they had the memory order of
  // attention's gradients (head by head), the backward of the projection would have to copy them.
  const auto gradient = [](bool wanted, const Tensor& dout) {
    return wanted ? empty_by_position(dout) : at::empty({0}, dout.options());
  };
  return {gradient(output_mask[0], dq_out), gradient(output_mask[1], dk_out)};
}
TW_OP(rotary_backward);

// The operands of a call: from[i] is rotated into to[i]. i = 0 stands for q, and i = 1 for k. If
// tensor i is empty or its result is not requested, from[i] and to[i] are undefined.
struct Rotation {
  std::array<Tensor, 2> from, to;
  Tensor cos, sin;  // (batch, seqlen, rotary_dim)
  bool interleaved, transposed;

  Rotation(const Tensor& q, const Tensor& k, const Pair& results, const Tensor& cos_table,
           const Tensor& sin_table, bool interleaved, bool transposed,
           std::array<bool, 2> wanted = {true, true})
      : interleaved(interleaved), transposed(transposed) {
    const std::array<Tensor, 2> given = {q, k};
    const std::array<Tensor, 2> outputs = {std::get<0>(results), std::get<1>(results)};
    for (int i = 0; i < 2; ++i) {
      if (!wanted[i] || given[i].numel() == 0) continue;
      from[i] = given[i].stride(3) == 1 ? given[i] : given[i].contiguous();
      to[i] = outputs[i];
    }
    const auto table = [&](const Tensor& t) {
      const Tensor rows = t.stride(-1) == 1 ? t : t.contiguous();
      return rows.expand({q.size(0), q.size(2), t.size(-1)});
    };
    cos = table(cos_table);
    sin = table(sin_table);
  }

  bool empty() const { return !from[0].defined() && !from[1].defined(); }
};

template <typename T, typename Table>
void rotate_of_dtypes_cpu(const Rotation& r) {
  RotaryOperands<T, Table> operands;
  for (int i = 0; i < 2; ++i) {
    const Tensor &from = r.from[i], &to = r.to[i];
    if (!from.defined()) continue;
    operands.tensors[i] = {from.const_data_ptr<T>(),
                           to.mutable_data_ptr<T>(),
                           from.size(1),
                           {from.stride(0), from.stride(1), from.stride(2)},
                           {to.stride(0), to.stride(1), to.stride(2)}};
    operands.head_dim = from.size(3);
  }
  operands.cos = {r.cos.const_data_ptr<Table>(), {r.cos.stride(0), r.cos.stride(1)}};
  operands.sin = {r.sin.const_data_ptr<Table>(), {r.sin.stride(0), r.sin.stride(1)}};
  operands.batch = r.cos.size(0);
  operands.seqlen = r.cos.size(1);
  operands.rotary_dim = r.cos.size(2);
  operands.interleaved = r.interleaved;
  operands.transposed = r.transposed;
  rotate_positions_cpu(operands);
}

void rotate_cpu(const Rotation& r) {
  if (r.empty()) return;
  const auto dtype = (r.from[0].defined() ? r.from[0] : r.from[1]).scalar_type();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "rotary", [&] {
    r.cos.scalar_type() == at::kFloat ? rotate_of_dtypes_cpu<scalar_t, float>(r)
                                      : rotate_of_dtypes_cpu<scalar_t, scalar_t>(r);
  });
}

Pair rotary_cpu(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                bool interleaved) {
  const Pair out = rotary_meta(q, k, cos, sin, interleaved);
  rotate_cpu({q, k, out, cos, sin, interleaved, /*transposed=*/false});
  return out;
}

Pair rotary_backward_cpu(const Tensor& dq_out, const Tensor& dk_out, const Tensor& cos,
                         const Tensor& sin, bool interleaved, std::array<bool, 2> output_mask) {
  const Pair grads = rotary_backward_meta(dq_out, dk_out, cos, sin, interleaved, output_mask);
  rotate_cpu({dq_out, dk_out, grads, cos, sin, interleaved, /*transposed=*/true, output_mask});
  return grads;
}

#ifdef TORCHWELD_CUDA
void rotate_cuda(const Rotation& r) {
  if (r.empty()) return;
  const OnDevice on(r.cos.device());
  // The stride of a dim of size 1 is never used, so it must not influence the alignment check.
  const auto stride = [](const Tensor& t, int d) { return t.size(d) == 1 ? 0 : t.stride(d); };
  RotaryParams p = {};
  for (int i = 0; i < 2; ++i) {
    const Tensor &from = r.from[i], &to = r.to[i];
    if (!from.defined()) continue;
    p.tensors[i] = {const_data<void>(from),
                    mutable_data<void>(to),
                    from.size(1),
                    {stride(from, 0), stride(from, 1), stride(from, 2)},
                    {stride(to, 0), stride(to, 1), stride(to, 2)}};
    p.head_dim = static_cast<int>(from.size(3));
    p.dtype = dtype_of(from);
  }
  p.cos = {const_data<void>(r.cos), {stride(r.cos, 0), stride(r.cos, 1)}};
  p.sin = {const_data<void>(r.sin), {stride(r.sin, 0), stride(r.sin, 1)}};
  p.batch = r.cos.size(0);
  p.seqlen = r.cos.size(1);
  p.rotary_dim = static_cast<int>(r.cos.size(2));
  p.interleaved = r.interleaved;
  p.transposed = r.transposed;
  p.table_dtype = dtype_of(r.cos);
  launch_rotary(p, current_stream());
}

Pair rotary_cuda(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                 bool interleaved) {
  const Pair out = rotary_meta(q, k, cos, sin, interleaved);
  rotate_cuda({q, k, out, cos, sin, interleaved, /*transposed=*/false});
  return out;
}

Pair rotary_backward_cuda(const Tensor& dq_out, const Tensor& dk_out, const Tensor& cos,
                          const Tensor& sin, bool interleaved, std::array<bool, 2> output_mask) {
  const Pair grads = rotary_backward_meta(dq_out, dk_out, cos, sin, interleaved, output_mask);
  rotate_cuda({dq_out, dk_out, grads, cos, sin, interleaved, /*transposed=*/true, output_mask});
  return grads;
}
#endif

struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& cos, const Tensor& sin, bool interleaved) {
    auto [q_out, k_out] = call_rotary.below(q, k, cos, sin, interleaved);
    ctx->save_for_backward({cos, sin});
    ctx->set_materialize_grads(false);
    ctx->saved_data["interleaved"] = interleaved;
    if (!q.requires_grad()) ctx->mark_non_differentiable({q_out});
    if (!k.requires_grad()) ctx->mark_non_differentiable({k_out});
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    AskedGradients asked(ctx);
    const std::array<bool, 2> wanted = {asked.next() && grads[0].defined(),
                                        asked.next() && grads[1].defined()};
    if (!wanted[0] && !wanted[1]) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    // A gradient that is not needed may be undefined. In that case, pass the other gradient
    // instead. The op does not read this placeholder.
    auto [dq, dk] =
        call_rotary_backward(wanted[0] ? grads[0] : grads[1], wanted[1] ? grads[1] : grads[0],
                             saved[0], saved[1], ctx->saved_data["interleaved"].toBool(), wanted);
    return {if_wanted(wanted[0], dq), if_wanted(wanted[1], dk), Tensor(), Tensor(), Tensor()};
  }
};

// Checks the arguments of a call that autograd records.
void rotary_checks(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos,
                   const Tensor& sin, bool) {
  check_inputs(op, "q", q, "k", k, cos, sin);
  const auto check_constant = [&](const char* name, const Tensor& t) {
    TW_CHECK(
        !t.requires_grad(), op, name,
        " must be a tensor that needs no gradient, but got requires_grad=True; only q and k have "
        "a gradient, use ",
        name, ".detach()");
  };
  check_constant("cos", cos);
  check_constant("sin", sin);
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m,
            "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False) -> "
            "(Tensor q_out, Tensor k_out)",
            TW_KERNELS(rotary), recorded_by<RotaryFunction>(call_rotary, rotary_checks));
  define_op(m,
            "rotary_backward(Tensor dq_out, Tensor dk_out, Tensor cos, Tensor sin, *, "
            "bool interleaved=False, bool[2] output_mask) -> (Tensor dq, Tensor dk)",
            TW_KERNELS(rotary_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::rotary_op
