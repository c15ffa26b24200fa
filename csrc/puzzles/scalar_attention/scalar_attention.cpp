// scalar_attention:  z[i] = sum_j p[i, j] v[j],  p[i, :] = softmax(q[i] * k)     q, k, v, z (n,)
// Gradient:          dq[i] = dz[i] sum_j p[i, j] (v[j] - z[i]) k[j]
//                    dk[j] = sum_i p[i, j] dz[i] q[i] (v[j] - z[i]),  dv[j] = sum_i p[i, j] dz[i]
//
// This is attention with a head dim of 1. The largest score of a row is q[i] * max(k) or
// q[i] * min(k), so the sums need no rescaling, and the memory is linear in n.
// scalar_attention_forward also returns two vectors (n,) for the backward, in fp32 (fp64 for fp64
// inputs). `mean` is z before rounding. `sum` is, for each row, the sum over j of
// exp(q[i] * k[j] - the row's largest score). The backward recomputes p from `sum`. For large
// scores, `sum` gives a more accurate p than a logsumexp. The CPU code holds the scores of one
// block of rows at a time. The CPU backward computes the softmax of the scores again.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "core/dispatch.h"
#include "core/linear_common.h"
#include "core/parallel.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "puzzles/scalar_attention/scalar_attention.h"
#endif

namespace torchweld::scalar_attention_op {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>;
using Grads3 = std::tuple<Tensor, Tensor, Tensor>;

void check_scalar_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  check_floating(op, "q", q);
  check_dim(op, "q", q, 1, "(n,)");
  check_like(op, "k", k, "q", q);
  check_shape(op, "k", k, q.sym_sizes(), "q's shape");
  check_like(op, "v", v, "q", q);
  check_shape(op, "v", v, q.sym_sizes(), "q's shape");
}

Tensor scalar_attention_meta(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_scalar_attention("scalar_attention", q, k, v);
  return at::empty_symint(q.sym_sizes(), q.options());
}
TW_OP(scalar_attention);

Forward scalar_attention_forward_meta(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_scalar_attention("scalar_attention_forward", q, k, v);
  const auto wide = q.options().dtype(acc_dtype(q));
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(q.sym_sizes(), wide),
          at::empty_symint(q.sym_sizes(), wide)};
}
TW_OP(scalar_attention_forward);

// The functions scalar_attention and scalar_attention_forward. `into` is the function of the device
// that computes the results.
template <auto into>
Tensor scalar_attention_on(const Tensor& q, const Tensor& k, const Tensor& v) {
  Tensor z = scalar_attention_meta(q, k, v);
  into(z, nullptr, nullptr, q, k, v);
  return z;
}

template <auto into>
Forward scalar_attention_forward_on(const Tensor& q, const Tensor& k, const Tensor& v) {
  auto [z, mean, sum] = scalar_attention_forward_meta(q, k, v);
  into(z, &mean, &sum, q, k, v);
  return {z, mean, sum};
}

void check_saved(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  check_device(op, name, t, "q", q);
  check_dtype(op, name, t, acc_dtype(q));
  check_shape(op, name, t, q.sym_sizes(), "q's shape");
}

Grads3 scalar_attention_backward_meta(const Tensor& dz, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& mean, const Tensor& sum,
                                      std::array<bool, 3> output_mask) {
  const char* op = "scalar_attention_backward";
  check_scalar_attention(op, q, k, v);
  check_like(op, "dz", dz, "q", q);
  check_shape(op, "dz", dz, q.sym_sizes(), "q's shape");
  check_saved(op, "mean", mean, q);
  check_saved(op, "sum", sum, q);
  return {empty_input_grad(q, output_mask[0]), empty_input_grad(k, output_mask[1]),
          empty_input_grad(v, output_mask[2])};
}
TW_OP(scalar_attention_backward);

// CPU: the division of the rows into blocks, and of the blocks into groups. The scores of a block
// fit into the cache of a core. The number of groups does not depend on the number of threads. A
// sum over rows is accumulated in each group separately, so its bits do not depend on the number of
// threads.
struct RowBlocks {
  static constexpr int64_t kScores = int64_t{1} << 16;
  static constexpr int64_t kMaxGroups = 32;

  int64_t n, rows, groups, per_group;

  explicit RowBlocks(int64_t size) : n(size), rows(std::clamp<int64_t>(kScores / size, 1, size)) {
    const int64_t blocks = (n + rows - 1) / rows;
    per_group = (blocks + kMaxGroups - 1) / kMaxGroups * rows;
    groups = (n + per_group - 1) / per_group;
  }

  // Calls body(group, first row, number of rows) for every block.
  template <typename Body>
  void for_each(const Body& body) const {
    parallel_tasks(groups, [&](int64_t group) {
      const int64_t last = std::min(n, (group + 1) * per_group);
      for (int64_t row = group * per_group; row < last; row += rows) {
        body(group, row, std::min(rows, last - row));
      }
    });
  }
};

// CPU: returns a contiguous copy of a vector in the dtype of the accumulator. The function always
// copies, because the bits of a matmul may depend on the alignment of its operands.
Tensor vector_of(const Tensor& t) {
  return t.detach().to(acc_dtype(t), /*non_blocking=*/false, /*copy=*/true).contiguous();
}

// CPU: returns the probabilities of a block of rows.
Tensor probabilities(const Tensor& q, const Tensor& k, int64_t first, int64_t rows) {
  const Tensor scores = at::mul(q.narrow(0, first, rows).unsqueeze(1), k);
  return at::_softmax(scores, -1, /*half_to_float=*/false);
}

// CPU: computes z, mean and sum. mean and sum may be nullptr if they are not needed.
void scalar_attention_into(Tensor& z, Tensor* mean, Tensor* sum, const Tensor& q, const Tensor& k,
                           const Tensor& v) {
  if (z.numel() == 0) return;
  const at::NoGradGuard below;
  const Tensor queries = vector_of(q), keys = vector_of(k), values = vector_of(v);
  RowBlocks(z.numel()).for_each([&](int64_t, int64_t first, int64_t rows) {
    const Tensor p = probabilities(queries, keys, first, rows);
    const Tensor means = at::mv(p, values);
    z.narrow(0, first, rows).copy_(means);
    if (!mean) return;
    mean->narrow(0, first, rows).copy_(means);
    // The largest exponential is 1, so its probability is 1 / sum.
    sum->narrow(0, first, rows).copy_(p.amax(1).reciprocal_());
  });
}

constexpr auto scalar_attention_cpu = scalar_attention_on<scalar_attention_into>;
constexpr auto scalar_attention_forward_cpu = scalar_attention_forward_on<scalar_attention_into>;

Grads3 scalar_attention_backward_cpu(const Tensor& dz, const Tensor& q, const Tensor& k,
                                     const Tensor& v, const Tensor& mean, const Tensor& sum,
                                     std::array<bool, 3> output_mask) {
  auto [dq, dk, dv] = scalar_attention_backward_meta(dz, q, k, v, mean, sum, output_mask);
  if (q.numel() == 0) return {dq, dk, dv};
  const at::NoGradGuard below;
  const Tensor queries = vector_of(q), keys = vector_of(k), values = vector_of(v);
  const Tensor means = vector_of(mean), weights = vector_of(dz);
  const RowBlocks blocks(q.numel());
  const Tensor dk_parts = at::zeros({blocks.groups, blocks.n}, values.options());
  const Tensor dv_parts = at::zeros_like(dk_parts);
  blocks.for_each([&](int64_t group, int64_t first, int64_t rows) {
    const Tensor p = probabilities(queries, keys, first, rows);
    const Tensor w = weights.narrow(0, first, rows);
    if (output_mask[2]) dv_parts[group].addmv_(p.t(), w);
    if (!output_mask[0] && !output_mask[1]) return;
    const Tensor moved = at::sub(values, means.narrow(0, first, rows).unsqueeze(1)).mul_(p);
    if (output_mask[0]) dq.narrow(0, first, rows).copy_(at::mv(moved, keys).mul_(w));
    if (output_mask[1]) {
      dk_parts[group].addmv_(moved.t(), w * queries.narrow(0, first, rows));
    }
  });
  if (output_mask[1]) dk.copy_(dk_parts.sum(0));
  if (output_mask[2]) dv.copy_(dv_parts.sum(0));
  return {dq, dk, dv};
}

#ifdef TORCHWELD_CUDA
ScalarAttentionVector strided(const Tensor& t) { return {const_data<void>(t), t.stride(0)}; }

Tensor scratch_of(const Tensor& q, bool backward) {
  return at::empty({scalar_attention_scratch_floats(q.numel(), backward)},
                   q.options().dtype(at::kFloat));
}

void scalar_attention_into_cuda(Tensor& z, Tensor* mean, Tensor* sum, const Tensor& q,
                                const Tensor& k, const Tensor& v) {
  if (z.numel() == 0) return;
  const OnDevice on(q.device());
  const Tensor scratch = scratch_of(q, /*backward=*/false);
  launch_scalar_attention(
      {strided(q), strided(k), strided(v), z.mutable_data_ptr(),
       mean ? mutable_data<float>(*mean) : nullptr, sum ? mutable_data<float>(*sum) : nullptr,
       mutable_data<float>(scratch), q.numel(), dtype_of(q)},
      current_stream());
}

constexpr auto scalar_attention_cuda = scalar_attention_on<scalar_attention_into_cuda>;
constexpr auto scalar_attention_forward_cuda =
    scalar_attention_forward_on<scalar_attention_into_cuda>;

Grads3 scalar_attention_backward_cuda(const Tensor& dz, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& mean, const Tensor& sum,
                                      std::array<bool, 3> output_mask) {
  auto [dq, dk, dv] = scalar_attention_backward_meta(dz, q, k, v, mean, sum, output_mask);
  if (dq.numel() + dk.numel() + dv.numel() == 0) return {dq, dk, dv};
  const OnDevice on(q.device());
  const Tensor means = mean.contiguous(), sums = sum.contiguous();
  const Tensor scratch = scratch_of(q, /*backward=*/true);
  const auto data = [](const Tensor& t) { return t.numel() ? mutable_data<void>(t) : nullptr; };
  launch_scalar_attention_backward(
      {strided(dz), strided(q), strided(k), strided(v), const_data<float>(means),
       const_data<float>(sums), data(dq), data(dk), data(dv), mutable_data<float>(scratch),
       q.numel(), dtype_of(q)},
      current_stream());
  return {dq, dk, dv};
}
#endif

struct ScalarAttentionFunction : torch::autograd::Function<ScalarAttentionFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v) {
    auto [z, mean, sum] = call_scalar_attention_forward.below(q, k, v);
    ctx->save_for_backward({q, k, v, mean, sum});
    return outputs_of(ctx, {z, mean, sum});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(3);
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const std::array<bool, 3> wanted = {asked.next(), asked.next(), asked.next()};
    auto [dq, dk, dv] = call_scalar_attention_backward(grads[0], saved[0], saved[1], saved[2],
                                                       saved[3], saved[4], wanted);
    return {if_wanted(wanted[0], dq), if_wanted(wanted[1], dk), if_wanted(wanted[2], dv)};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "scalar_attention(Tensor q, Tensor k, Tensor v) -> Tensor",
            TW_KERNELS(scalar_attention),
            recorded_by<ScalarAttentionFunction>(call_scalar_attention, check_scalar_attention));
  define_op(m,
            "scalar_attention_forward(Tensor q, Tensor k, Tensor v) -> "
            "(Tensor z, Tensor mean, Tensor sum)",
            TW_KERNELS(scalar_attention_forward),
            recorded_by<ScalarAttentionFunction>(call_scalar_attention_forward));
  define_op(
      m,
      "scalar_attention_backward(Tensor dz, Tensor q, Tensor k, Tensor v, Tensor mean, Tensor sum, "
      "*, bool[3] output_mask) -> (Tensor dq, Tensor dk, Tensor dv)",
      TW_KERNELS(scalar_attention_backward), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::scalar_attention_op
