// Sums over the last dim:  y[...] = sum_j x[..., j]        x (..., n), y (...)
// Gradient:                dx[..., j] = dy[...], an expanded view, twice differentiable
//
// The sums are accumulated in fp32 (fp64 for fp64 inputs) and rounded once. If n is 0, the sums are
// 0, as in torch.
#include <ATen/ops/empty.h>

#include "core/dispatch.h"
#include "core/sum.h"

#ifdef TORCHWELD_CUDA
#include "core/choices.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "core/launch.h"
#include "puzzles/row_sum/family.h"
#include "puzzles/row_sum/row_sum.h"
#endif

namespace torchweld::row_sum_op {
namespace {

Tensor row_sum_meta(const Tensor& x) {
  check_floating("row_sum", "x", x);
  check_min_dim("row_sum", "x", x, 1, "(..., n)");
  return at::empty_symint(without_last(x), x.options());
}
TW_OP(row_sum);

Tensor row_sum_cpu(const Tensor& x) {
  Tensor y = row_sum_meta(x);
  const int64_t rows = y.numel();
  if (rows > 0) sum_into(y.view({rows}), x.reshape({rows, x.size(-1)}), 1);
  return y;
}

#ifdef TORCHWELD_CUDA
Tensor row_sum_cuda(const Tensor& x) {
  Tensor y = row_sum_meta(x);
  if (y.numel() == 0) return y;
  if (x.numel() == 0) return y.zero_();
  const OnDevice on(x.device());
  const cudaStream_t stream = current_stream();
  const Rows in(x);
  const int elem_size = static_cast<int>(x.element_size());
  const bool aligned = reinterpret_cast<uintptr_t>(in.tensor.const_data_ptr()) % 16 == 0 &&
                       in.row_stride * elem_size % 16 == 0;
  const RowSumChoice choice =
      pick<RowSumFamily>({in.rows, in.n, elem_size, in.row_stride == in.n, aligned,
                          x.scalar_type() == at::kBFloat16, device_facts()});
  Tensor partials, counters;
  if (choice.splits > 1) {
    partials = at::empty({choice.partials(in.rows)}, x.options().dtype(at::kFloat));
    counters = zero_counters(in.rows, x);
  }
  launch_row_sum({const_data<void>(in.tensor), mutable_data<void>(y), in.rows, in.n, in.row_stride,
                  dtype_of(x), choice, partials.defined() ? mutable_data<float>(partials) : nullptr,
                  counters.defined() ? mutable_data<unsigned>(counters) : nullptr},
                 stream);
  return y;
}

#endif

struct RowSumFunction : torch::autograd::Function<RowSumFunction> {
  static constexpr bool kTwice = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    Tensor y = call_row_sum.below(x);
    ctx->saved_data["n"] = x.sym_size(-1);
    return y;
  }

  // dx is an expanded view of dy, as in torch.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    std::vector<c10::SymInt> sizes = grads[0].sym_sizes().vec();
    sizes.push_back(ctx->saved_data["n"].toSymInt());
    return {grads[0].unsqueeze(-1).expand_symint(sizes)};
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "row_sum(Tensor x) -> Tensor", TW_KERNELS(row_sum),
            recorded_by<RowSumFunction>(call_row_sum));
}

}  // namespace
}  // namespace torchweld::row_sum_op
