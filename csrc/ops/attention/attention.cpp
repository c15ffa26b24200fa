// attention:  out = softmax(scale * query @ key.T) @ value over the keys that a row sees
//   query (batch, nheads, seqlen_q, head_dim), key (batch, nheads_kv, seqlen_k, head_dim),
//   value (batch, nheads_kv, seqlen_k, head_dim_v), out (batch, nheads, seqlen_q, head_dim_v)
//   nheads_kv divides nheads. Query heads [h * group, (h + 1) * group) share kv head h, where group
//   is nheads / nheads_kv.
//
// A result has the memory order of an input (empty_in_order_of): `out` and dquery have the order of
// query, dkey has the order of key, and dvalue has the order of value. Therefore a model that
// passes views of (batch, seqlen, nheads, head_dim) can reshape `out` to (batch, seqlen,
// nheads * head_dim_v) without a copy.
//
// attention_forward also returns lse (batch, nheads, seqlen_q), the logsumexp of each row's scaled
// scores. The backward recomputes the probabilities from lse. attention_with_lse returns lse, too,
// and lse is differentiable there. The CPU code holds the scores of one block of query rows at a
// time, so its memory is linear in the sequence length.
// Source: Dao, "FlashAttention-2", 2023, for the gradient from lse.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "attention/cpu/bwd.h"
#include "attention/mask_op.h"
#include "attention/saved_checks.h"

#ifdef TORCHWELD_CUDA
#include "attention/bwd.h"
#include "attention/family.h"
#include "attention/mask_cuda.h"
#include "attention/params.h"
#include "core/choices.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#endif

namespace torchweld::attention_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Checks the arguments and returns the sizes of `out`.
std::vector<c10::SymInt> check_attention(const char* op, const Tensor& query, const Tensor& key,
                                         const Tensor& value, const Mask& mask,
                                         std::optional<double> scale) {
  const char* key_layout = "(batch, nheads_kv, seqlen_k, head_dim)";
  const char* value_layout = "(batch, nheads_kv, seqlen_k, head_dim_v)";
  check_floating(op, "query", query);
  check_dim(op, "query", query, 4, "(batch, nheads, seqlen_q, head_dim)");
  check_like(op, "key", key, "query", query);
  check_dim(op, "key", key, 4, key_layout);
  check_shape(op, "key", key,
              {query.sym_size(0), key.sym_size(1), key.sym_size(2), query.sym_size(3)}, key_layout);
  check_like(op, "value", value, "query", query);
  check_dim(op, "value", value, 4, value_layout);
  check_shape(op, "value", value,
              {query.sym_size(0), key.sym_size(1), key.sym_size(2), value.sym_size(3)},
              value_layout);
  const auto nheads = query.sym_size(1), nheads_kv = key.sym_size(1);
  const bool divides = nheads_kv == 0 ? nheads == 0 : nheads % nheads_kv == 0;
  TW_CHECK(divides, op, "key must be ", key_layout,
           " with nheads_kv a divisor of nheads = ", nheads, ", but got nheads_kv = ", nheads_kv,
           "; if heads come after the tokens use .transpose(1, 2)");
  check_mask(op, mask, query.sym_size(0), nheads, query.sym_size(2), "query", query,
             /*allows_row_ends=*/true);
  check_bias(op, mask, query, key.sym_size(2));
  check_alibi_slopes(op, mask, query);
  if (scale) {
    check_finite(op, "scale", *scale);
  }
  return with_last(query, value.sym_size(3));
}
constexpr auto attention_checks = attention_mask_op<check_attention>;

// Whether `t` (batch, heads, seqlen, columns) is a view of a tensor (batch, seqlen, heads, columns)
// with stride 1 along the last dimension. If the heads of `t` are expanded, their stride is 0, and
// the result is false.
bool is_position_major(const Tensor& t) {
  const auto head_stride = t.sym_stride(1);
  return TORCH_GUARD_OR_FALSE(t.sym_stride(3).sym_eq(1)) &&
         TORCH_GUARD_OR_FALSE(head_stride.sym_gt(0)) &&
         TORCH_GUARD_OR_FALSE(head_stride.sym_lt(t.sym_stride(2)));
}

// Allocates a dense tensor (batch, heads, seqlen, columns). If the memory order of `like` is
// (batch, seqlen, heads, columns), the new tensor has this order, too. Otherwise it is contiguous.
Tensor empty_in_order_of(const Tensor& like, const std::vector<c10::SymInt>& sizes) {
  if (!is_position_major(like)) return at::empty_symint(sizes, like.options());
  return at::empty_symint({sizes[0], sizes[2], sizes[1], sizes[3]}, like.options()).transpose(1, 2);
}

// The empty_* functions check the arguments of an op and allocate its results. They do not compute
// the results.
Tensor empty_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                       const Mask& mask, std::optional<double> scale) {
  return empty_in_order_of(query, check_attention("attention", query, key, value, mask, scale));
}

Forward empty_out_and_lse(const char* op, const Tensor& query, const Tensor& key,
                          const Tensor& value, const Mask& mask, std::optional<double> scale) {
  return {empty_in_order_of(query, check_attention(op, query, key, value, mask, scale)),
          at::empty_symint(without_last(query), query.options().dtype(acc_dtype(query)))};
}

Forward empty_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                const Mask& mask, std::optional<double> scale) {
  return empty_out_and_lse("attention_forward", query, key, value, mask, scale);
}

Forward empty_attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const Mask& mask, std::optional<double> scale) {
  return empty_out_and_lse("attention_with_lse", query, key, value, mask, scale);
}

bool has_dbias(const Mask& mask, bool bias_requires_grad) {
  return bias_requires_grad && is_given(mask.bias);
}

Grads empty_attention_backward(const Tensor& dout, const Tensor& query, const Tensor& key,
                               const Tensor& value, const Tensor& out, const Tensor& lse,
                               const Mask& mask, std::optional<double> scale,
                               const OptionalTensor& dlse, bool bias_requires_grad) {
  const char* op = "attention_backward";
  const auto sizes = check_attention(op, query, key, value, mask, scale);
  check_attention_saved(op, dout, out, lse, sizes, "query", query);
  if (is_given(dlse)) {
    check_like(op, "dlse", *dlse, "lse", lse);
    check_shape(op, "dlse", *dlse, lse.sym_sizes(), "(batch, nheads, seqlen_q)");
  }
  const auto empty = [](const Tensor& t) { return empty_in_order_of(t, t.sym_sizes().vec()); };
  const Tensor dbias = has_dbias(mask, bias_requires_grad)
                           ? at::empty_symint(mask.bias->sym_sizes(), mask.bias->options())
                           : at::empty({0}, query.options());
  return {empty(query), empty(key), empty(value), empty_dsink(mask.sink, query), dbias};
}

constexpr auto attention_meta = attention_mask_op<empty_attention>;
constexpr auto attention_forward_meta = attention_mask_op<empty_attention_forward>;
constexpr auto attention_with_lse_meta = attention_mask_op<empty_attention_with_lse>;
constexpr auto attention_backward_meta = attention_mask_op<empty_attention_backward>;
TW_OP(attention);
TW_OP(attention_forward);
TW_OP(attention_with_lse);
TW_OP(attention_backward);

// Computes attention. `fill` is the function that computes `out` on a device.
template <auto fill>
Tensor attention_on(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
                    std::optional<double> scale) {
  Tensor out = empty_attention(query, key, value, mask, scale);
  fill(out, nullptr, query, key, value, mask, scale);
  return out;
}

template <auto empty, auto fill>
Forward attention_forward_on(const Tensor& query, const Tensor& key, const Tensor& value,
                             const Mask& mask, std::optional<double> scale) {
  auto [out, lse] = empty(query, key, value, mask, scale);
  fill(out, &lse, query, key, value, mask, scale);
  return {out, lse};
}

double scale_or_default(std::optional<double> scale, const Tensor& query) {
  return scale.value_or(1.0 / std::sqrt(std::max<double>(1, query.size(3))));
}

void fill_attention_cpu(Tensor& out, Tensor* lse, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Mask& mask, std::optional<double> scale);

// Whether fill_parts_cpu can compute a call of the batch-invariant mode.
bool has_parts_cpu(const Mask& mask) {
  const bool known_positions = mask.has_row_ends() || !is_given(mask.key_end);
  const bool needs_positions = mask.window || is_given(mask.leftpad);
  return is_given(mask.key_start) && known_positions && (mask.causal || !needs_positions) &&
         mask.dropout_p == 0 && !is_given(mask.bias) && !is_given(mask.alibi_slopes);
}

// Computes rows that have one key_start in a call of their own. The tiles of keys then start at the
// first key of each document, so the packing does not change the order of the sums.
void fill_parts_cpu(Tensor& out, Tensor* lse, const Tensor& query, const Tensor& key,
                    const Tensor& value, const Mask& mask, std::optional<double> scale) {
  const int64_t seqlen_q = query.size(2), seqlen_k = key.size(2);
  const Tensor starts = mask.key_start->contiguous();
  for (int64_t b = 0; b < query.size(0); ++b) {
    const int32_t* start = starts.const_data_ptr<int32_t>() + b * seqlen_q;
    for (int64_t row = 0, end = 0; row < seqlen_q; row = end) {
      while (end < seqlen_q && start[end] == start[row]) ++end;
      const auto rows_of = [&](const Tensor& t) {
        return t.narrow(0, b, 1).narrow(t.dim() == 2 ? 1 : 2, row, end - row);
      };
      // The last row has the last key, so the rows keep their positions.
      const int64_t behind_last = end + seqlen_k - seqlen_q;
      const int64_t keys =
          mask.causal && !mask.has_row_ends() ? std::max<int64_t>(0, behind_last) : seqlen_k;
      const auto keys_of = [&](const Tensor& t) { return t.narrow(0, b, 1).narrow(2, 0, keys); };
      Mask part = mask;
      part.key_start = rows_of(starts);
      if (is_given(mask.key_end)) part.key_end = rows_of(*mask.key_end);
      if (is_given(mask.leftpad)) part.leftpad = mask.leftpad->narrow(0, b, 1);
      Tensor part_out = rows_of(out);
      Tensor part_lse =
          lse ? at::empty_like(rows_of(*lse), at::MemoryFormat::Contiguous) : Tensor();
      fill_attention_cpu(part_out, lse ? &part_lse : nullptr, rows_of(query), keys_of(key),
                         keys_of(value), part, scale);
      if (lse) rows_of(*lse).copy_(part_lse);
    }
  }
}

void fill_attention_cpu(Tensor& out, Tensor* lse, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Mask& mask, std::optional<double> scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  if (is_batch_invariant() && has_parts_cpu(mask)) {
    const Tensor& starts = *mask.key_start;
    const bool is_one_part =
        starts.size(0) == 1 && starts.eq(starts.select(1, 0)).all().item<bool>();
    if (!is_one_part) return fill_parts_cpu(out, lse, query, key, value, mask, scale);
  }
  const CpuAttention a(query, key, value, mask, scale_or_default(scale, query));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, query.scalar_type(), "attention", [&] {
    if (a.has_few_rows()) {
      const auto row_major = [](const Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
      attention_forward_rows<scalar_t>(a, out, lse, query, row_major(key), row_major(value));
    } else if (std::is_same_v<scalar_t, at::BFloat16> && multiplies_bf16(a.head_dim) &&
               !is_batch_invariant()) {
      // NOTE: the sums of oneDNN's bf16 products may depend on the number of rows.
      attention_forward_tiles<at::BFloat16, at::BFloat16>(a, out, lse, query, key, value);
    } else {
      attention_forward_tiles<scalar_t>(a, out, lse, query, key, value);
    }
  });
}

constexpr auto attention_cpu = attention_mask_op<attention_on<fill_attention_cpu>>;
constexpr auto attention_forward_cpu =
    attention_mask_op<attention_forward_on<empty_attention_forward, fill_attention_cpu>>;
constexpr auto attention_with_lse_cpu =
    attention_mask_op<attention_forward_on<empty_attention_with_lse, fill_attention_cpu>>;

Grads attention_grads_cpu(const Tensor& dout, const Tensor& query, const Tensor& key,
                          const Tensor& value, const Tensor& out, const Tensor& lse,
                          const Mask& mask, std::optional<double> scale, const OptionalTensor& dlse,
                          bool bias_requires_grad) {
  auto [dquery, dkey, dvalue, dsink, dbias] = empty_attention_backward(
      dout, query, key, value, out, lse, mask, scale, dlse, bias_requires_grad);
  Tensor ds;
  if (has_dbias(mask, bias_requires_grad)) {
    ds = at::zeros({query.size(0), query.size(1), query.size(2), key.size(2)},
                   query.options().dtype(acc_dtype(query)));
  }
  const CpuAttention a(query, key, value, mask, scale_or_default(scale, query));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, query.scalar_type(), "attention", [&] {
    attention_backward_tiles<scalar_t>(a, dquery, dkey, dvalue, dsink, ds, dout, query, key, value,
                                       out, lse, dlse);
  });
  if (ds.defined()) dbias = bias_gradient(*mask.bias, ds);
  return {dquery, dkey, dvalue, dsink, dbias};
}
constexpr auto attention_backward_cpu = attention_mask_op<attention_grads_cpu>;

#ifdef TORCHWELD_CUDA
// Chooses the kernel of the backward. If there are no keys, no kernel runs, and the returned choice
// is arbitrary.
AttentionChoice backward_choice(const AttentionSizes& sizes, DType dtype, bool tf32,
                                const MaskParams& mask) {
  if (sizes.batch * sizes.nheads_kv * sizes.seqlen_k == 0) return {AttentionEngine::kSync, 0};
  return pick<AttentionBackwardFamily>(attention_problem(sizes, dtype, tf32, mask));
}

// Converts a tensor to an AttentionTensor. If a dim has only one element, its stride is set to 0,
// because the original stride has no meaning and might not be aligned.
AttentionTensor strided(const Tensor& t) {
  const auto stride = [&](int64_t d) { return t.size(d) > 1 ? t.stride(d) : 0; };
  return {t.const_data_ptr(), stride(0), stride(1), stride(2)};
}
AttentionOutput strided_output(const Tensor& t) {
  const AttentionTensor from = strided(t);
  return {t.mutable_data_ptr(), from.batch_stride, from.head_stride, from.row_stride};
}

AttentionSizes sizes_of(const Tensor& query, const Tensor& key, const Tensor& value) {
  return {query.size(0), query.size(1), key.size(1),  query.size(2),
          key.size(2),   query.size(3), value.size(3)};
}

void fill_attention_cuda(Tensor& out, Tensor* lse, const Tensor& query, const Tensor& key,
                         const Tensor& value, const Mask& mask, std::optional<double> scale) {
  if (out.numel() == 0 && (!lse || lse->numel() == 0)) return;
  const OnDevice on(query.device());
  const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
  const Mask device_mask = kernel_mask(mask);
  AttentionParams params{};
  params.query = strided(q);
  params.key = strided(k);
  params.value = strided(v);
  params.out = strided_output(out);
  params.lse = lse ? mutable_data<float>(*lse) : nullptr;
  params.sizes = sizes_of(query, key, value);
  params.mask = kernel_params(device_mask, query.size(2), key.size(2));
  params.scale = static_cast<float>(scale_or_default(scale, query));
  params.tf32 = matmul_may_use_tf32(query);
  params.dtype = dtype_of(query);
  const AttentionProblem problem =
      attention_problem(params.sizes, params.dtype, params.tf32, params.mask);
  // NOTE: tiles of many rows would read the keys once for each query head.
  const auto has_many_rows = [&] {
    const AttentionEngine engine = choose_attention(problem).engine;
    return problem.invariant ? engine != AttentionEngine::kChain : engine == AttentionEngine::kWide;
  };
  if (problem.load.packable && has_many_rows()) {
    const int64_t kv_heads = key.size(1), group = query.size(1) / kv_heads;
    const auto by_group = [&](const Tensor& t) {
      return t.squeeze(2).unflatten(1, {kv_heads, group});
    };
    Mask of_rows = mask;
    of_rows.causal = false;
    const OptionalTensor& start = is_given(mask.leftpad) ? mask.leftpad : mask.key_start;
    if (is_given(start)) of_rows.key_start = start->view({-1, 1}).expand({-1, group});
    of_rows.leftpad = std::nullopt;
    Tensor out_rows = by_group(out), lse_rows = lse ? by_group(*lse) : Tensor();
    return fill_attention_cuda(out_rows, lse ? &lse_rows : nullptr, by_group(q), k, v, of_rows,
                               scale_or_default(scale, query));
  }
  params.choice = pick<AttentionFamily>(problem);
  if (problem.invariant) params.key_grid = attention_step_keys(params.choice);
  Tensor partials, flags, ticket;
  if (const int64_t floats = attention_partial_floats(problem, params.choice); floats > 0) {
    partials = at::empty({floats}, query.options().dtype(at::kFloat));
    params.partials = mutable_data<float>(partials);
  }
  if (const int64_t count = attention_flags(problem, params.choice); count > 0) {
    flags = block_flags(count, query);
    params.flags = mutable_data<uint64_t>(flags);
  }
  if (params.choice.engine == AttentionEngine::kSm90) {
    ticket = zero_counters(1, query);
    params.counters = static_cast<unsigned*>(ticket.mutable_data_ptr());
  }
  launch_attention(params, current_stream());
}

constexpr auto attention_cuda = attention_mask_op<attention_on<fill_attention_cuda>>;
constexpr auto attention_forward_cuda =
    attention_mask_op<attention_forward_on<empty_attention_forward, fill_attention_cuda>>;
constexpr auto attention_with_lse_cuda =
    attention_mask_op<attention_forward_on<empty_attention_with_lse, fill_attention_cuda>>;

// Allocates ds (batch, nheads, seqlen_q, seqlen_k), the gradient of the scaled scores. Its rows are
// aligned to 16 bytes, as TMA needs. The kernels don't write the scores of tiles that the mask
// hides.
Tensor empty_ds(const Tensor& query, int64_t seqlen_k, const MaskParams& mask) {
  const std::vector<int64_t> sizes = {query.size(0), query.size(1), query.size(2),
                                      divide_up(seqlen_k, 8) * 8};
  const bool all_written = !mask.may_hide_keys();
  return (all_written ? at::empty(sizes, query.options()) : at::zeros(sizes, query.options()))
      .narrow(3, 0, seqlen_k);
}

Grads attention_grads_cuda(const Tensor& dout, const Tensor& query, const Tensor& key,
                           const Tensor& value, const Tensor& out, const Tensor& lse,
                           const Mask& mask, std::optional<double> scale,
                           const OptionalTensor& dlse, bool bias_requires_grad) {
  auto [dquery, dkey, dvalue, dsink, dbias] = empty_attention_backward(
      dout, query, key, value, out, lse, mask, scale, dlse, bias_requires_grad);
  const bool nothing = dquery.numel() + dkey.numel() + dvalue.numel() == 0;
  const bool of_scores = is_given(mask.sink) || has_dbias(mask, bias_requires_grad);
  if (nothing && (!of_scores || lse.numel() == 0)) {
    dsink.zero_();
    return {dquery, dkey, dvalue, dsink, dbias.zero_()};
  }
  const OnDevice on(query.device());
  const Tensor q = attention_rows(query), k = attention_rows(key), v = attention_rows(value);
  const Tensor o = attention_rows(out), d_out = attention_rows(dout), l = lse.contiguous();
  const Mask device_mask = kernel_mask(mask);
  const Tensor dl = is_given(dlse) ? dlse->contiguous() : Tensor();
  Tensor sink_terms;  // (batch, nheads)
  AttentionBackwardParams params{};
  params.query = strided(q);
  params.key = strided(k);
  params.value = strided(v);
  params.out = strided(o);
  params.dout = strided(d_out);
  params.lse = const_data<float>(l);
  params.dquery = strided_output(dquery);
  params.dkey = strided_output(dkey);
  params.dvalue = strided_output(dvalue);
  params.sizes = sizes_of(query, key, value);
  params.mask = kernel_params(device_mask, query.size(2), key.size(2));
  params.scale = static_cast<float>(scale_or_default(scale, query));
  params.tf32 = matmul_may_use_tf32(query);
  params.dtype = dtype_of(query);
  Tensor ds;
  if (has_dbias(mask, bias_requires_grad)) {
    ds = empty_ds(query, key.size(2), params.mask);
    params.ds = strided_output(ds);
  }
  params.choice = backward_choice(params.sizes, params.dtype, params.tf32, params.mask);
  const int64_t bytes = attention_backward_scratch_bytes(params);
  const Tensor scratch = at::empty({bytes}, query.options().dtype(at::kByte));
  params.scratch = scratch.mutable_data_ptr();
  params.dlse = dl.defined() ? const_data<float>(dl) : nullptr;
  if (is_given(mask.sink)) {
    sink_terms = at::empty({params.sizes.batch, params.sizes.nheads}, l.options());
    params.dsink = mutable_data<float>(sink_terms);
  }
  launch_attention_backward(params, current_stream());
  add_sink_terms(dsink, sink_terms);
  if (ds.defined()) dbias = bias_gradient(*mask.bias, ds);
  return {dquery, dkey, dvalue, dsink, dbias};
}
constexpr auto attention_backward_cuda = attention_mask_op<attention_grads_cuda>;
#endif

// The autograd function of attention. If kWithLse is true, this is the autograd function of
// attention_with_lse, and `lse` is also differentiable.
template <bool kWithLse>
struct AttentionFunction : torch::autograd::Function<AttentionFunction<kWithLse>> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& value, const OptionalTensor& leftpad, bool causal,
                               std::optional<double> scale, const OptionalTensor& key_start,
                               const OptionalTensor& key_end, std::optional<int64_t> window,
                               std::optional<double> softcap, const OptionalTensor& sink,
                               double dropout_p, const OptionalTensor& dropout_seed,
                               const OptionalTensor& bias, const OptionalTensor& alibi_slopes) {
    auto [out, lse] = call_attention_forward.below(query, key, value, leftpad, causal, scale,
                                                   key_start, key_end, window, softcap, sink,
                                                   dropout_p, dropout_seed, bias, alibi_slopes);
    save_with_mask(ctx, {query, key, value, out, lse},
                   {leftpad, causal, key_start, key_end, window, softcap, sink, dropout_p,
                    dropout_seed, bias, alibi_slopes});
    ctx->saved_data["scale"] = scale;
    if (!kWithLse) return outputs_of(ctx, {out, lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor dlse = kWithLse ? grads[1] : Tensor();
    variable_list all(15);
    if (!grads[0].defined() && !dlse.defined()) return all;
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
    const Mask mask = saved_mask(ctx, saved);
    // Arguments behind the bias have no gradient.
    AskedGradients asked(ctx);
    for (const bool given :
         {true, true, true, is_given(mask.leftpad), is_given(mask.key_start),
          is_given(mask.key_end), is_given(mask.sink), is_given(mask.dropout_seed)}) {
      asked.next(given);
    }
    const bool asks_dbias = asked.next(is_given(mask.bias));
    auto [dquery, dkey, dvalue, dsink, dbias] = call_attention_backward(
        dout, saved[0], saved[1], saved[2], saved[3], saved[4], mask.leftpad, mask.causal,
        ctx->saved_data["scale"].toOptional<double>(), mask.key_start, mask.key_end, mask.window,
        mask.softcap, mask.sink, mask.dropout_p, mask.dropout_seed, mask.bias, mask.alibi_slopes,
        optional(dlse), asks_dbias);
    all[0] = dquery, all[1] = dkey, all[2] = dvalue;
    all[10] = if_wanted(is_given(mask.sink), dsink);
    all[13] = if_wanted(asks_dbias, dbias);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "Tensor query, Tensor key, Tensor value, ";
  const std::string mask =
      "Tensor? leftpad=None, *, bool causal=False, float? scale=None, " TW_MASK_SCHEMA
          TW_ATTENTION_SCHEMA;
  define_op(m, "attention(" + inputs + mask + ") -> Tensor", TW_KERNELS(attention),
            recorded_by<AttentionFunction<false>>(call_attention, attention_checks));
  define_op(m, "attention_forward(" + inputs + mask + ") -> (Tensor out, Tensor lse)",
            TW_KERNELS(attention_forward),
            recorded_by<AttentionFunction<false>>(call_attention_forward));
  define_op(m, "attention_with_lse(" + inputs + mask + ") -> (Tensor out, Tensor lse)",
            TW_KERNELS(attention_with_lse),
            recorded_by<AttentionFunction<true>>(call_attention_with_lse, attention_checks));
  define_op(m,
            "attention_backward(Tensor dout, " + inputs + "Tensor out, Tensor lse, " + mask +
                ", Tensor? dlse=None, bool bias_requires_grad=True) -> "
                "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsink, Tensor dbias)",
            TW_KERNELS(attention_backward), no_gradient_function());
  define_autocast(m, call_attention);
  define_autocast(m, call_attention_forward);
  define_autocast(m, call_attention_with_lse);
}

}  // namespace
}  // namespace torchweld::attention_op
