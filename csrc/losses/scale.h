// Computes to = t * factor in the accumulation dtype and rounds once. `factor` is a scalar tensor
// on the device of t. `to` may be t itself. If it is and the factor is 1, nothing is read or
// written.
#pragma once

#include <ATen/ops/mul.h>

#include "core/check.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "losses/params.h"
#endif

namespace torchweld {

using ScaleInto = void (*)(Tensor& to, const Tensor& t, const Tensor& factor);

// NOTE: on the CPU, at::mul reads a scalar tensor in the scalar's own dtype. On CUDA, it would
// first round the scalar to the dtype of t.
inline void scale_into_cpu(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (to.is_same(t) && factor.item().toDouble() == 1) return;
  at::mul_out(to, t, factor);
}

#ifdef TORCHWELD_CUDA
inline void scale_into_cuda(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (t.numel() == 0) return;
  const OnDevice on(t.device());
  // If t is dense, `to` has the strides of t, because empty_like made it. `dense` then has these
  // strides too, so the kernel reads and writes in memory order.
  const Tensor dense = t.strides() == to.strides() ? t : at::empty_like(to).copy_(t);
  launch_loss_scale({const_data<void>(dense), mutable_data<void>(to), const_data<float>(factor),
                     t.numel(), dtype_of(t)},
                    current_stream());
}
#endif

}  // namespace torchweld
