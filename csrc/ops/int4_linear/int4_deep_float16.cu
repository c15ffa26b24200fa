#include "ops/int4_linear/int4_deep_kernel.cuh"

namespace torchweld {

template void launch_int4_deep_of<__half>(const Int4LinearParams& params, cudaStream_t stream);

}  // namespace torchweld
