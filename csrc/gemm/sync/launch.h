// The launcher of the matmul on mma.sync. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

// Launches the kernel for one tile size and one GemmMath. csrc/instantiations.py lists the
// instantiations.
template <GemmMath kMath, SyncSize kSize>
void launch_sync_size(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
