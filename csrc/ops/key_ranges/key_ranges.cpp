// _key_ranges returns the range of keys that each token of packed sequences sees, in the form of
// attention's arguments key_start and key_end (1, tokens). Sequence i has the query tokens
// [cu_seqlens_q[i], cu_seqlens_q[i + 1]) and the keys [key_begin[i], key_end[i]). Without key_end,
// key_begin is (sequences + 1,) and sequence i ends where sequence i + 1 begins. varlen_attention
// and key_start_from_cu_seqlens call this op.
//
// The values stay on the device and are not checked. If cu_seqlens_q does not ascend, the ranges
// have no meaning, and attention clamps them to its keys.
#include "ops/key_ranges/key_ranges.h"

#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "core/parallel.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#endif

namespace torchweld::key_ranges_op {
namespace {

using Ranges = std::tuple<Tensor, Tensor>;

Ranges _key_ranges_meta(const Tensor& cu_seqlens_q, const Tensor& key_begin,
                        const std::optional<Tensor>& key_end, c10::SymInt tokens,
                        std::optional<int64_t> before, std::optional<int64_t> after,
                        bool top_left) {
  const char* op = "_key_ranges";
  const char* first = "cu_seqlens_q";
  check_dtype(op, first, cu_seqlens_q, at::kInt);
  check_dim(op, first, cu_seqlens_q, 1, "(sequences + 1,)");
  TW_CHECK(cu_seqlens_q.sym_size(0) >= 1, op, "cu_seqlens_q must be (sequences + 1,), but got ",
           describe(cu_seqlens_q));
  const c10::SymInt sequences = cu_seqlens_q.sym_size(0) - 1;
  check_like(op, "key_begin", key_begin, first, cu_seqlens_q);
  if (key_end) {
    check_shape(op, "key_begin", key_begin, {sequences}, "(sequences,)");
    check_like(op, "key_end", *key_end, first, cu_seqlens_q);
    check_shape(op, "key_end", *key_end, {sequences}, "(sequences,)");
  } else {
    // key_begin holds both the begins and the ends. The alternative is one slice of it for the
    // begins and another for the ends. But for a single sequence these slices would have one
    // element, and torch.compile makes a separate graph for a size of 1.
    check_shape(op, "key_begin", key_begin, {sequences + 1}, "(sequences + 1,)");
  }
  TW_CHECK(tokens >= 0 && tokens <= INT32_MAX, op, "tokens must be from 0 to 2^31 - 1, but got ",
           tokens);
  TW_CHECK(before.value_or(0) >= 0, op, "before must be at least 0, but got ", *before);
  TW_CHECK(after.value_or(0) >= 0, op, "after must be at least 0, but got ", *after);
  const auto empty = [&] { return at::empty_symint({1, tokens}, cu_seqlens_q.options()); };
  return {empty(), empty()};
}

constexpr int64_t kMaxWindow = int64_t{1} << 40;  // a window of this size hides no key

// The contiguous tensors and the parameters of a call.
struct Call {
  Tensor cu_seqlens_q, key_begin, key_end, row_begin, row_end;
  KeyRangesParams params;

  Call(const Tensor& lengths, const Tensor& begin, const std::optional<Tensor>& end, int64_t tokens,
       std::optional<int64_t> before, std::optional<int64_t> after, bool top_left)
      : cu_seqlens_q(lengths.contiguous()), key_begin(begin.contiguous()) {
    std::tie(row_begin, row_end) =
        _key_ranges_meta(lengths, begin, end, tokens, before, after, top_left);
    if (end) key_end = end->contiguous();
    const auto* begins = key_begin.const_data_ptr<int32_t>();
    params = {cu_seqlens_q.const_data_ptr<int32_t>(),
              begins,
              end ? key_end.const_data_ptr<int32_t>() : begins + 1,
              row_begin.mutable_data_ptr<int32_t>(),
              row_end.mutable_data_ptr<int32_t>(),
              cu_seqlens_q.size(0) - 1,
              tokens,
              std::min(before.value_or(-1), kMaxWindow),
              std::min(after.value_or(-1), kMaxWindow),
              top_left};
  }
};

Ranges _key_ranges_cpu(const Tensor& cu_seqlens_q, const Tensor& key_begin,
                       const std::optional<Tensor>& key_end, int64_t tokens,
                       std::optional<int64_t> before, std::optional<int64_t> after, bool top_left) {
  const Call call(cu_seqlens_q, key_begin, key_end, tokens, before, after, top_left);
  constexpr int64_t kGrain = 4096;
  parallel_tasks((tokens + kGrain - 1) / kGrain, [&](int64_t task) {
    const int64_t end = std::min(tokens, (task + 1) * kGrain);
    for (int64_t token = task * kGrain; token < end; ++token) call.params.write(token);
  });
  return {call.row_begin, call.row_end};
}

#ifdef TORCHWELD_CUDA
Ranges _key_ranges_cuda(const Tensor& cu_seqlens_q, const Tensor& key_begin,
                        const std::optional<Tensor>& key_end, int64_t tokens,
                        std::optional<int64_t> before, std::optional<int64_t> after,
                        bool top_left) {
  const OnDevice on(cu_seqlens_q.device());
  const Call call(cu_seqlens_q, key_begin, key_end, tokens, before, after, top_left);
  if (tokens > 0) launch_key_ranges(call.params, current_stream());
  return {call.row_begin, call.row_end};
}
#endif

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m,
            "_key_ranges(Tensor cu_seqlens_q, Tensor key_begin, Tensor? key_end, SymInt tokens, "
            "int? before=None, int? after=None, bool top_left=False) -> "
            "(Tensor key_start, Tensor key_end)",
            TW_KERNELS(_key_ranges), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::key_ranges_op
