// Runs a matrix pass on CUDA tensors. This is host code for CUDA builds only.
#pragma once

#include <ATen/ops/empty.h>

#include "core/cuda_inputs.h"
#include "core/device.h"
#include "pointwise/matrix_cells.h"
#include "pointwise/matrix_tensors.h"

namespace torchweld {

// Launches the pass. All sizes of the matrix must be at least 1. Every cell of
// pointwise/matrix_cells.h has an instantiation in pointwise/matrix_kernels.cu.
template <typename F>
void launch_matrix_pass(const MatrixPassParams& params, const F& f, cudaStream_t stream);

// Runs the pass on the tensors of t. None of these tensors may be empty.
template <typename F>
void matrix_pass_cuda(const F& f, const MatrixPassTensors& t) {
  const Tensor& shape = F::kReads > 0 ? t.in[0] : t.out;
  const OnDevice on(shape.device());
  MatrixPassParams params = {};
  std::optional<Rows> in[2];
  for (int i = 0; i < F::kReads; ++i) {
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
  params.n = shape.size(-1);
  params.rows = shape.numel() / params.n;
  params.dtype = dtype_of(shape);
  Tensor scratch;
  if constexpr (F::kRowSums || F::kColumnSums) {
    params.sms = device_facts().sms;
    const int64_t floats = plan_matrix_pass(params).scratch();
    if (floats > 0) scratch = at::empty({floats}, shape.options().dtype(at::kFloat));
    if (floats > 0) params.scratch = mutable_data<float>(scratch);
  }
  launch_matrix_pass(params, f, current_stream());
}

}  // namespace torchweld
