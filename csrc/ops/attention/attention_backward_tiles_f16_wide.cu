// The gradient of attention in float16, head dims to 256.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<__half, 4>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__half, 5>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<__half, 6>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
