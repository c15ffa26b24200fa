// The launchers of outer_add, z[i, j] = x[j] + y[i].
#pragma once

#include <cuda_runtime_api.h>

#include "pointwise/matrix_pass.h"

namespace torchweld {

// Launch functions. All sizes must be at least 1.
void launch_outer_add(const MatrixPassParams& params, cudaStream_t stream);
void launch_outer_add_backward(const MatrixPassParams& params, cudaStream_t stream);

}  // namespace torchweld
