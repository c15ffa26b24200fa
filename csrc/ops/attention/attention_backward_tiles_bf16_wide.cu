// The gradient of attention in bfloat16, head dims to 256.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<__nv_bfloat16, 4>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__nv_bfloat16, 5>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__nv_bfloat16, 6>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
