#include "gemm/sm90/kernel.cuh"

namespace torchweld {

template void launch_sm90_tile<float, 0>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<float, 1>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<float, 2>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<float, 3>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<float, 4>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<float, 5>(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
