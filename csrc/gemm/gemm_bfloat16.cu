#include "gemm/sync/kernel.cuh"

namespace torchweld {

template void launch_sync_size<GemmMath::kBFloat16, SyncSize::kLarge>(const GemmParams& params,
                                                                      cudaStream_t stream);

}  // namespace torchweld
