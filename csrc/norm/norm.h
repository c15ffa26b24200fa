// LayerNorm and RMSNorm of rows, and their gradients: what the host hands to the kernels.
//
//   y = (x - mean) * rstd * (scale + scale_offset) + shift
//   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   x, y (rows, n), scale and shift (n,), mean and rstd (rows,) in fp32; RMSNorm has mean 0
// With a residual (rows, n), x is the sum of both, rounded to their dtype, and is stored too.
//
// The norm is a kernel of its own before a matmul, not the matmul's prologue: a prologue would
// repeat it for every work tile along N, which only few and short rows are worth (gemm/rows). Nor
// is the mean folded into the epilogue, which loses digits as |mean| / std grows. The normalised
// rows are scratch that the matmul finds in L2.
// Nor do idle warps of the Hopper matmul make it beside the products. layer_norm_linear with GELU
// on an H200: (8192, 768, 3072) took 95 us so, 80 with this kernel; (512, 1024, 4096) 24 and 21.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "norm/norm_config.h"

namespace torchweld {

// Columns of a matrix are adjacent, vectors are contiguous.
struct NormParams {
  const void* x;
  const void* residual;     // nullptr: x is normalised as it is
  const void* scale;        // nullptr: 1, without an offset
  const void* shift;        // nullptr: 0
  const float* saved_mean;  // statistics to use; nullptr where they are to be computed
  const float* saved_rstd;
  void* y;    // nullptr where only the statistics are asked for
  void* sum;  // x + residual, contiguous
  float* mean;
  float* rstd;  // nullptr where not requested
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t residual_row_stride;
  int64_t y_row_stride;
  float eps;
  float scale_offset;
  bool centred;  // LayerNorm
  DType dtype;
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
// g = dy * (scale + scale_offset),  xhat = (x - mean) * rstd;  RMSNorm has no mean(g).
// Where the rows fit in a block (norm_config.h) one kernel also computes what
// NormVectorsBackwardParams asks for.
struct NormBackwardParams {
  const void* dy;
  const void* x;
  const void* dsum;   // nullptr: 0
  const void* scale;  // nullptr: 1, without an offset
  const float* mean;  // nullptr: RMSNorm
  const float* rstd;
  void* dx;         // nullptr where not requested
  void* dscale;     // nullptr where not requested
  void* dshift;     // nullptr where not requested
  float* partials;  // plan_norm_backward(params).partials values; nullptr without dscale and dshift
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  int64_t dsum_row_stride;
  int64_t dx_row_stride;
  float scale_offset;
  DType dtype;
};

// dscale = sum over the rows of dy * xhat, dshift = that of dy: a pass of its own.
struct NormVectorsBackwardParams {
  const void* dy;
  const void* x;
  const float* mean;  // nullptr: RMSNorm
  const float* rstd;
  void* dscale;     // nullptr where not requested
  void* dshift;     // nullptr where not requested
  float* partials;  // 2 * column_partials(rows, n), see pointwise/column_split.h
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  DType dtype;
};

// Sizes are at least 1.
void launch_norm(const NormParams& params, cudaStream_t stream);

// How the gradients of rows are computed on the current device.
NormBackwardPlan plan_norm_backward(const NormBackwardParams& params);
void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream);
// The kernels of launch_norm_backward: for rows of the plan's tile, and dx alone for longer ones.
void launch_norm_backward_rows(const NormBackwardParams& params, const NormBackwardPlan& plan,
                               cudaStream_t stream);
void launch_norm_backward_stream(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_vectors_backward(const NormVectorsBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
