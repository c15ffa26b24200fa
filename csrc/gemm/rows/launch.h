// The launcher of the engine for few rows. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

// Launches the kernel for the dtype of kMath. csrc/instantiations.py lists the instantiations.
template <GemmMath kMath>
void launch_rows_tiles(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
