#include "gemm/gemm_kernel.cuh"

namespace torchweld {

template void launch_gemm_size<GemmMath::kBFloat16, GemmSize::kMedium>(const GemmParams& params,
                                                                       cudaStream_t stream);

}  // namespace torchweld
