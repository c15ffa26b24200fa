#include "ops/int4_linear/int4_wide_kernel.cuh"

namespace torchweld {

template void launch_int4_wide_of<__half>(const Int4LinearParams& params, cudaStream_t stream);

}  // namespace torchweld
