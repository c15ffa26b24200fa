// The host interface of the CUDA kernels of rms_norm_gated and of its gradients.
//
//   y = r * rstd * scale * silu(gate),  r = x
//   gate_first:  y = r * rstd * scale,  r = x * silu(gate)
//   rstd = 1 / sqrt(mean(r * r) + eps)
//
// x, gate and y are (rows, n), scale is (n,), rstd is (rows,) in fp32. All matrices have stride 1
// along a row; y, dx and dgate are contiguous. scale and dscale have the dtype vector_dtype, which
// is `dtype` or fp32. A scale of nullptr stands for ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct NormGatedParams {
  const void* x;
  const void* gate;
  const void* scale;
  void* y;
  float* rstd;  // output, or nullptr if not requested
  int64_t rows, n;
  int64_t x_row_stride, gate_row_stride;
  float eps;
  bool gate_first;
  DType dtype, vector_dtype;
};

struct NormGatedBackwardParams {
  const void* dy;
  const void* x;
  const void* gate;
  const void* scale;
  const float* rstd;
  void* dx;         // nullptr if not requested
  void* dgate;      // nullptr if not requested
  void* dscale;     // nullptr if not requested
  float* partials;  // norm_gated_partials() values, if dscale is requested
  int64_t rows, n;
  int64_t dy_row_stride, x_row_stride, gate_row_stride;
  bool gate_first;
  DType dtype, vector_dtype;
};

// The number of fp32 values of workspace that the sums for dscale need on the current device.
int64_t norm_gated_partials(const NormGatedBackwardParams& params);

// rows and n must be at least 1.
void launch_norm_gated(const NormGatedParams& params, cudaStream_t stream);
void launch_norm_gated_backward(const NormGatedBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
