// The CUDA engine of cross_entropy (ops/cross_entropy/engine.h).
#ifdef TORCHWELD_CUDA

#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "ops/cross_entropy/engine.h"
#include "ops/cross_entropy/params.h"

namespace torchweld::cross_entropy_op {

void cross_entropy_rows_cuda(const char*, const LogitInputs& in, const LogitRows& rows,
                             const Tensor& dloss, const Tensor& dlogits) {
  if (in.logits.numel() == 0) return;
  const OnDevice on(in.logits.device());
  const Rows logits(in.logits);
  const bool gradient = dlogits.defined();
  launch_cross_entropy(
      {const_data<void>(logits.tensor), logits.row_stride, logits.rows, logits.n,
       dtype_of(in.logits), const_data<int64_t>(in.targets), *in.options.ignore_index,
       in.options.logit_scale<float>(), static_cast<float>(1 / in.options.temperature),
       in.options.terms<float>(), rows.loss.defined() ? mutable_data<float>(rows.loss) : nullptr,
       mutable_data<float>(rows.max), mutable_data<float>(rows.log_sum),
       gradient ? const_data<float>(dloss) : nullptr, gradient ? dloss.stride(0) : 0,
       gradient ? mutable_data<void>(dlogits) : nullptr},
      lazy_zero_counter(in.logits), current_stream());
}

}  // namespace torchweld::cross_entropy_op

#endif
