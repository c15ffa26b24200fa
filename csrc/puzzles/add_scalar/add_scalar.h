// The launcher of add_scalar, z = x + value.
#pragma once

#include <cuda_runtime_api.h>

#include "pointwise/matrix_pass.h"

namespace torchweld {

// Launches add_scalar. All sizes must be at least 1.
void launch_add_scalar(const MatrixPassParams& params, float value, cudaStream_t stream);

}  // namespace torchweld
