// The gradient of attention in float16, head dims to 128.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<__half, 0>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__half, 1>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__half, 2>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__half, 3>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
