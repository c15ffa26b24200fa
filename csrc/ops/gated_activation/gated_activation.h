// The launchers of gated_activation, which computes y = gate(left, right) for two matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation_kind.h"
#include "core/dtype.h"

namespace torchweld {

// All matrices are (rows, n) with stride 1 along the last dimension.
struct GatedActivationParams {
  const void *left, *right;
  void* y;  // contiguous
  int64_t left_row_stride, right_row_stride;
  int64_t rows, n;
  Gate gate;
  DType dtype;
};

struct GatedActivationBackwardParams {
  const void *dy, *left, *right;
  void *dleft, *dright;  // contiguous; nullptr for a gradient that is not requested
  int64_t dy_row_stride, left_row_stride, right_row_stride;
  int64_t rows, n;
  Gate gate;
  DType dtype;
};

// Launch functions. All sizes must be at least 1.
void launch_gated_activation(const GatedActivationParams& params, cudaStream_t stream);
void launch_gated_activation_backward(const GatedActivationBackwardParams& params,
                                      cudaStream_t stream);

}  // namespace torchweld
