// From a product of few rows to its kernel. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

void launch_rows_gemm(const GemmParams& params, cudaStream_t stream);

// The tiles of one dtype, in a file of their own (csrc/instantiations.py).
template <GemmMath kMath>
void launch_rows_tiles(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
