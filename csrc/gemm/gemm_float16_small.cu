#include "gemm/gemm_kernel.cuh"

namespace torchweld {

template void launch_gemm_size<GemmMath::kFloat16, GemmSize::kSmall>(const GemmParams& params,
                                                                     cudaStream_t stream);

}  // namespace torchweld
