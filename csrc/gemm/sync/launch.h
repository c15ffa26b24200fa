// Launches the kernel on mma.sync for a product. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

void launch_sync_gemm(const GemmParams& params, cudaStream_t stream);

// Launches a kernel of one tile size and dtype; csrc/instantiations.py has the instantiations.
template <GemmMath kMath, SyncSize kSize>
void launch_sync_size(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
