// to = t * factor, computed in the dtype of sums and rounded once; factor is a scalar on t's
// device. `to` may be t, which a factor of 1 then leaves unread.
#pragma once

#include <ATen/ops/mul.h>

#include "core/check.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "losses/params.h"
#endif

namespace torchweld {

using ScaleInto = void (*)(Tensor& to, const Tensor& t, const Tensor& factor);

// NOTE: on the CPU at::mul uses a scalar tensor in its own dtype. On CUDA it would round the scalar
// to the dtype of t.
inline void scale_into_cpu(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (to.is_same(t) && factor.item().toDouble() == 1) return;
  at::mul_out(to, t, factor);
}

#ifdef TORCHWELD_CUDA
inline void scale_into_cuda(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (t.numel() == 0) return;
  const OnDevice on(t.device());
  // empty_like gives `to` the strides of t if t is dense. `dense` has the same strides, so the
  // kernel reads and writes in memory order.
  const Tensor dense = t.strides() == to.strides() ? t : at::empty_like(to).copy_(t);
  launch_loss_scale({const_data<void>(dense), mutable_data<void>(to), const_data<float>(factor),
                     t.numel(), dtype_of(t)},
                    current_stream());
}
#endif

}  // namespace torchweld
