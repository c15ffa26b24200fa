// The host interface of the CUDA kernels of LayerNorm and RMSNorm and of their gradients.
//
//   y = (x - mean) * rstd * (scale + scale_offset) + shift
//   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// x and y are (rows, n), scale and shift are (n,), mean and rstd are (rows,) in fp32. In RMSNorm,
// the mean is 0, and shift must be nullptr. If a residual (rows, n) is given, the kernel adds it to
// x and rounds the sum to the dtype of x. It then normalises this sum instead of x, and also stores
// the sum.
//
// If an op consists of a norm and a matmul, the norm is a kernel of its own. The matmul then
// usually finds the normalised rows in L2. Two alternatives are:
//   A prologue of the matmul normalises the rows. It would normalise them again for every output
//   tile along N, so it is faster only for few and short rows (gemm/rows).
//   The epilogue of the matmul applies the mean. This would lose digits if the mean is large
//   relative to the standard deviation.
//
// A third alternative is that idle warps of the Hopper matmul normalise the rows during the matmul.
// This is slower than a separate kernel. Times of layer_norm_linear with GELU on an H200: for (M,
// K, N) = (8192, 768, 3072), 95 us with idle warps and 80 us with a separate kernel; for (512,
// 1024, 4096), 24 us and 21 us.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "norm/norm_config.h"

namespace torchweld {

// The parameters of the forward kernel. All matrices have stride 1 along a row, and all vectors are
// contiguous. Scale, shift and their gradients have the dtype vector_dtype, which is `dtype` or
// fp32.
struct NormParams {
  const void* x;
  const void* residual;     // if residual is nullptr, the kernel normalises x alone
  const void* scale;        // if nullptr, the scale is 1, and scale_offset must be 0
  const void* shift;        // if nullptr, the shift is 0
  const float* saved_mean;  // saved statistics; if nullptr, the kernel computes them
  const float* saved_rstd;
  void* y;    // if nullptr, the kernel computes only the statistics
  void* sum;  // output: x + residual, contiguous
  float* mean;
  float* rstd;  // mean and rstd are outputs, or nullptr if not requested
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t residual_row_stride;
  int64_t y_row_stride;
  float eps;
  float scale_offset;
  bool centred;  // true for LayerNorm, false for RMSNorm
  DType dtype, vector_dtype;
};

// The parameters of the kernels that compute the gradients:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
//   g = dy * (scale + scale_offset),  xhat = (x - mean) * rstd
// In RMSNorm, the term mean(g) is absent. If a row fits in a block (norm_config.h), one kernel
// computes dx, dscale and dshift. Otherwise one kernel computes dx and another kernel computes
// dscale and dshift.
struct NormBackwardParams {
  const void* dy;
  const void* x;
  const void* dsum;   // the gradient with respect to the stored sum, or nullptr
  const void* scale;  // if nullptr, the scale is 1, and scale_offset must be 0
  const float* mean;  // nullptr for RMSNorm
  const float* rstd;
  void* dx;      // nullptr if not requested
  void* dscale;  // nullptr if not requested
  void* dshift;  // nullptr if not requested
  // A workspace. NormBackwardPlan::partials is the number of fp32 values in the workspace.
  // `partials` is nullptr if neither dscale nor dshift is requested.
  float* partials;
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  int64_t dsum_row_stride;
  int64_t dx_row_stride;
  float scale_offset;
  DType dtype, vector_dtype;
};

// The parameters of the kernel that computes dscale and dshift, but not dx:
//   dscale = sum over the rows of dy * xhat,  dshift = sum over the rows of dy
struct NormVectorsBackwardParams {
  const void* dy;
  const void* x;
  const float* mean;  // nullptr for RMSNorm
  const float* rstd;
  void* dscale;     // nullptr if not requested
  void* dshift;     // nullptr if not requested
  float* partials;  // 2 * column_partials(rows, n) values (pointwise/column_split.h)
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  DType dtype, vector_dtype;
};

// Launches the forward kernel. rows and n must be at least 1.
void launch_norm(const NormParams& params, cudaStream_t stream);
// launch_norm calls this function for x's element type. csrc/instantiations.py lists the types.
template <typename T>
void launch_norm_of(const NormParams& params, cudaStream_t stream);

// Chooses the kernels that compute the gradients on the current device.
NormBackwardPlan plan_norm_backward(const NormBackwardParams& params);
void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream);
// launch_norm_backward calls the functions below. If a row fits in a tile, it calls
// launch_norm_backward_rows_of, which computes all gradients. Otherwise it calls
// launch_norm_backward_stream, which computes dx, and launch_norm_vectors_backward, which computes
// dscale and dshift.
template <typename T>
void launch_norm_backward_rows_of(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                  cudaStream_t stream);
void launch_norm_backward_stream(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_vectors_backward(const NormVectorsBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
