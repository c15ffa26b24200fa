// From tensors to the arguments of a matrix pass. Host code of CUDA builds only.
#pragma once

#include <ATen/ops/empty.h>

#include "core/cuda_inputs.h"
#include "core/device.h"
#include "pointwise/matrix_pass.h"

namespace torchweld {

// The scratch of a pass with sums, on the current device; keep it until the launch.
inline Tensor matrix_pass_scratch(MatrixPassParams& params, const Tensor& like) {
  params.sms = device_facts().sms;
  const int64_t floats = plan_matrix_pass(params).scratch();
  if (floats == 0) return Tensor();
  Tensor scratch = at::empty({floats}, like.options().dtype(at::kFloat));
  params.scratch = mutable_data<float>(scratch);
  return scratch;
}

}  // namespace torchweld
