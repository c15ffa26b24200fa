#include "gemm/sync/kernel.cuh"

namespace torchweld {

template void launch_sync_size<GemmMath::kFloat16, SyncSize::kSmall>(const GemmParams& params,
                                                                     cudaStream_t stream);

}  // namespace torchweld
