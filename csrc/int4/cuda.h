// Calls the kernels of a repacked 4-bit weight on tensors. This is host code for CUDA builds only.
#pragma once

#include "core/batch_invariance.h"
#include "core/choices.h"
#include "core/cuda_inputs.h"
#include "core/launch.h"
#include "core/linear_common.h"
#include "int4/family.h"
#include "int4/params.h"
#include "layers/matmul.h"

namespace torchweld {

struct RepackedWeight {
  Int4Shape shape;
  Tensor packed, scale, zero;
};

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Returns t, or a copy of t if it is not contiguous or not 16-byte aligned.
inline Tensor aligned_contiguous(const Tensor& t) {
  if (t.is_contiguous() && is_aligned(t)) return t;
  const Tensor copy = at::empty(t.sizes(), t.options());
  copy.copy_(t);
  return copy;
}

// Returns x (M, K), or a copy of x if needed. The result has stride 1 along K, and its rows start
// on 16-byte boundaries.
inline Tensor aligned_rows(const Tensor& x) {
  const bool rows = x.size(0) == 1 || x.stride(0) * x.element_size() % 16 == 0;
  return x.stride(1) == 1 && rows && is_aligned(x) ? x : aligned_contiguous(x.contiguous());
}

// The kernel parameters of a weight. `tensors` owns the memory to which `params` points.
struct KernelWeight {
  RepackedWeight tensors;
  Int4Weight params;

  explicit KernelWeight(const RepackedWeight& weight)
      : tensors{weight.shape, aligned_contiguous(weight.packed), aligned_contiguous(weight.scale),
                aligned_contiguous(weight.zero)},
        params{weight.shape, static_cast<const uint32_t*>(tensors.packed.const_data_ptr()),
               tensors.scale.const_data_ptr(),
               static_cast<const uint32_t*>(tensors.zero.const_data_ptr())} {}
};

// Returns the dense weight (N, K), rounded to the dtype of the scales.
inline Tensor int4_dequantise(const RepackedWeight& weight) {
  const KernelWeight in(weight);
  Tensor dense = at::empty({weight.shape.n, weight.shape.k}, weight.scale.options());
  launch_int4_dequantise({in.params, dense.mutable_data_ptr(), dtype_of(weight.scale)},
                         current_stream());
  return dense;
}

// Computes y (M, N) = x (M, K) @ W^T + bias. y must be contiguous and not empty.
inline void int4_matmul_into(const Tensor& y, const Tensor& x, const RepackedWeight& weight,
                             const OptionalTensor& bias) {
  if (weight.shape.k == 0) {
    is_given(bias) ? y.copy_(bias->expand_as(y)) : y.zero_();
    return;
  }
  const Int4Problem problem{
      y.size(0),      weight.shape,        int(x.element_size()), x.scalar_type() == at::kBFloat16,
      device_facts(), is_batch_invariant()};
  const Int4Choice choice = pick<Int4Family>(problem);
  if (choice.engine == Int4Engine::kDense) {
    matmul_into(y, x, int4_dequantise(weight), {bias});
    return;
  }
  const Tensor in_x = aligned_rows(x);
  const KernelWeight in_weight(weight);
  const Vector in_bias(bias);
  Int4LinearParams p{};
  GemmParams& g = p.gemm;
  g.m = y.size(0);
  g.n = weight.shape.n;
  g.k = weight.shape.k;
  g.batch = 1;
  g.a = {in_x.const_data_ptr(), in_x.size(0) == 1 ? 0 : in_x.stride(0), 1, 0};
  g.y = y.mutable_data_ptr();
  g.y_row_stride = y.size(1);
  g.dtype = dtype_of(y);
  g.epilogue.bias = in_bias.data();
  g.choice.splits = choice.cluster ? 1 : choice.splits;
  Tensor workspace;
  if (g.choice.splits > 1) {
    workspace = at::empty({choice.splits * g.m * gemm_sum_width(g.n, /*gated=*/false)},
                          y.options().dtype(at::kFloat));
    g.workspace = mutable_data<float>(workspace);
  }
  p.weight = in_weight.params;
  p.choice = choice;
  p.sms = problem.device.sms;
  p.clusters = problem.device.clusters;
  launch_int4_linear(p, current_stream());
}

// Computes dx (M, K) = dy (M, N) @ W.
inline void int4_matmul_backward_into(const Tensor& dx, const Tensor& dy,
                                      const RepackedWeight& weight) {
  if (weight.shape.n == 0) {
    dx.zero_();
    return;
  }
  matmul_into(dx, dy, Matrix(int4_dequantise(weight)).t());
}

}  // namespace torchweld
