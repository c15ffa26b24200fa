// The launchers of mul_relu, z[i, j] = relu(x[i, j] * y[i]).
#pragma once

#include <cuda_runtime_api.h>

#include "pointwise/matrix_pass.h"

namespace torchweld {

// Launch functions. All sizes must be at least 1.
void launch_mul_relu(const MatrixPassParams& params, cudaStream_t stream);
void launch_mul_relu_backward(const MatrixPassParams& params, cudaStream_t stream);

}  // namespace torchweld
