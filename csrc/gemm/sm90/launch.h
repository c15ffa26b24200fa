// From a product to the kernel on wgmma and TMA that takes it. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld {

void launch_sm90_gemm(const GemmParams& params, cudaStream_t stream);

// One tile's kernels for one dtype, in files of their own (csrc/instantiations.py).
template <typename T, int kTile>
void launch_sm90_tile(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
