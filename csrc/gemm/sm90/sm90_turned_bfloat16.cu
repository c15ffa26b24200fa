#include "gemm/sm90/kernel.cuh"

namespace torchweld {

template void launch_sm90_tile<__nv_bfloat16, 4>(const Sm90Params& params, cudaStream_t stream);
template void launch_sm90_tile<__nv_bfloat16, 5>(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
