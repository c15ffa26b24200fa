#include "gemm/gemm_kernel.cuh"

namespace torchweld {

template void launch_gemm_math<GemmMath::kFloat32>(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
