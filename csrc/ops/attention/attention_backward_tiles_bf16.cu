// The gradient of attention in bfloat16, head dims to 128.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<__nv_bfloat16, 0>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__nv_bfloat16, 1>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__nv_bfloat16, 2>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__nv_bfloat16, 3>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
