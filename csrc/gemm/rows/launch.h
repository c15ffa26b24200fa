// Launches the kernel for a product of few rows. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

void launch_rows_gemm(const GemmParams& params, cudaStream_t stream);

// Launches a kernel of one dtype; csrc/instantiations.py has the instantiations.
template <GemmMath kMath>
void launch_rows_tiles(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
