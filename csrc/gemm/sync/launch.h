// Launches the kernel on mma.sync for a product. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

void launch_sync_gemm(const GemmParams& params, cudaStream_t stream);

// The tiles of one size for one kind of arithmetic, in files of their own (csrc/instantiations.py).
template <GemmMath kMath, SyncSize kSize>
void launch_sync_size(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
