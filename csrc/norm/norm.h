// The host's interface to the CUDA kernels of LayerNorm and RMSNorm and of their gradients.
//
//   y = (x - mean) * rstd * (scale + scale_offset) + shift
//   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// x and y are (rows, n), scale and shift are (n,), mean and rstd are (rows,) in fp32. For RMSNorm,
// the mean is 0. If a residual (rows, n) is given, the kernel normalises x + residual, rounded to
// the dtype of x, and also stores this sum.
//
// In an op that runs a norm and a matmul, the norm is a separate kernel and not a prologue of the
// matmul. A prologue would normalise the rows again for every output tile along N, which only pays
// for few and short rows (gemm/rows). Folding the mean into the matmul's epilogue instead would
// lose digits if the mean is large relative to the standard deviation. The matmul reads the
// normalised rows from L2.
//
// Idle warps of the Hopper matmul could also normalise the rows during the matmul, but this is
// slower. layer_norm_linear with GELU on an H200 took 95 us that way and 80 us with this kernel for
// (M, K, N) = (8192, 768, 3072), and 24 us against 21 us for (512, 1024, 4096).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "norm/norm_config.h"

namespace torchweld {

// The columns of a matrix are contiguous, and so are vectors.
struct NormParams {
  const void* x;
  const void* residual;     // nullptr: the kernel normalises x alone
  const void* scale;        // nullptr: the scale is 1; scale_offset must be 0
  const void* shift;        // nullptr: the shift is 0
  const float* saved_mean;  // given statistics; nullptr: the kernel computes them
  const float* saved_rstd;
  void* y;    // nullptr: the kernel computes only the statistics
  void* sum;  // output x + residual, contiguous
  float* mean;
  float* rstd;  // mean and rstd are outputs; nullptr: not requested
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t residual_row_stride;
  int64_t y_row_stride;
  float eps;
  float scale_offset;
  bool centred;  // true for LayerNorm, false for RMSNorm
  DType dtype;
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
// g = dy * (scale + scale_offset),  xhat = (x - mean) * rstd
// RMSNorm does not subtract mean(g). If the rows fit in a block (norm_config.h), the kernel that
// computes dx also computes dscale and dshift.
struct NormBackwardParams {
  const void* dy;
  const void* x;
  const void* dsum;   // the gradient of the stored sum x + residual; nullptr: 0
  const void* scale;  // nullptr: the scale is 1; scale_offset must be 0
  const float* mean;  // nullptr for RMSNorm
  const float* rstd;
  void* dx;         // nullptr if not requested
  void* dscale;     // nullptr if not requested
  void* dshift;     // nullptr if not requested
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

// Parameters of the kernel that computes only dscale and dshift:
// dscale = sum over the rows of dy * xhat,  dshift = sum over the rows of dy
struct NormVectorsBackwardParams {
  const void* dy;
  const void* x;
  const float* mean;  // nullptr for RMSNorm
  const float* rstd;
  void* dscale;     // nullptr if not requested
  void* dshift;     // nullptr if not requested
  float* partials;  // 2 * column_partials(rows, n) values, see pointwise/column_split.h
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  DType dtype;
};

// Launches the forward kernel. rows and n must be at least 1.
void launch_norm(const NormParams& params, cudaStream_t stream);

// Chooses the kernel of the gradients on the current device.
NormBackwardPlan plan_norm_backward(const NormBackwardParams& params);
void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream);
// The kernels that launch_norm_backward chooses from. The first computes all gradients, for rows
// that fit in a tile. The second computes dx of longer rows, and the third their dscale and dshift.
void launch_norm_backward_rows(const NormBackwardParams& params, const NormBackwardPlan& plan,
                               cudaStream_t stream);
void launch_norm_backward_stream(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_vectors_backward(const NormVectorsBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
