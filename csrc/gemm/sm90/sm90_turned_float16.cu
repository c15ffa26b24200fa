#include "gemm/sm90/kernel.cuh"

namespace torchweld {

template void launch_sm90_tile<__half, 4>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<__half, 5>(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
