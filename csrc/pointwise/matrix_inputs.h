// Launches a matrix pass on tensors. This is host code for CUDA builds only.
#pragma once

#include <ATen/ops/empty.h>

#include "core/cuda_inputs.h"
#include "core/device.h"
#include "pointwise/matrix_pass.h"
#include "pointwise/matrix_tensors.h"

namespace torchweld {

// Runs `launch` on the tensors of t. None of these tensors may be empty.
inline void matrix_pass_cuda(void (*launch)(const MatrixPassParams&, cudaStream_t),
                             const MatrixPassTensors& t) {
  const Tensor& shape = t.in[0].defined() ? t.in[0] : t.out;
  const OnDevice on(shape.device());
  MatrixPassParams params = {};
  std::optional<Rows> in[2];
  for (int i = 0; i < 2; ++i) {
    if (!t.in[i].defined()) continue;
    in[i].emplace(t.in[i]);
    params.in[i] = const_data<void>(in[i]->tensor);
    params.in_row_stride[i] = in[i]->row_stride;
  }
  const auto data = [](const Tensor& to) {
    return to.defined() ? mutable_data<void>(to) : nullptr;
  };
  const Vector x(t.x), y(t.y);
  params.x = x.data();
  params.y = y.data();
  params.out = data(t.out);
  params.row_sums = data(t.row_sums);
  params.column_sums = data(t.column_sums);
  params.rows = shape.size(0);
  params.n = shape.size(1);
  params.dtype = dtype_of(shape);
  Tensor scratch;
  if (t.row_sums.defined() || t.column_sums.defined()) {
    params.sms = device_facts().sms;
    const int64_t floats = plan_matrix_pass(params).scratch();
    if (floats > 0) scratch = at::empty({floats}, shape.options().dtype(at::kFloat));
    if (floats > 0) params.scratch = mutable_data<float>(scratch);
  }
  launch(params, current_stream());
}

}  // namespace torchweld
