// Functions that compute to = t * factor in the accumulation dtype and round the result once.
// `factor` is a scalar tensor on the device of t. `to` may be t itself. If `to` is t and the factor
// is 1, t is neither read nor written.
#pragma once

#include <ATen/ops/mul.h>

#include "core/check.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "losses/params.h"
#endif

namespace torchweld {

using ScaleInto = void (*)(Tensor& to, const Tensor& t, const Tensor& factor);

// NOTE: on the CPU, at::mul multiplies by a scalar tensor in the dtype of this scalar. On CUDA,
// at::mul would first round the scalar to the dtype of t, so scale_into_cuda does not use at::mul.
inline void scale_into_cpu(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (to.is_same(t) && factor.item().toDouble() == 1) return;
  at::mul_out(to, t, factor);
}

#ifdef TORCHWELD_CUDA
inline void scale_into_cuda(Tensor& to, const Tensor& t, const Tensor& factor) {
  if (t.numel() == 0) return;
  const OnDevice on(t.device());
  // empty_like has allocated `to`, so `to` is dense. `dense` holds the values of t with the strides
  // of `to`, so the kernel reads and writes in memory order.
  const Tensor dense = t.strides() == to.strides() ? t : at::empty_like(to).copy_(t);
  launch_loss_scale({const_data<void>(dense), mutable_data<void>(to), const_data<float>(factor),
                     t.numel(), dtype_of(t)},
                    current_stream());
}
#endif

}  // namespace torchweld
