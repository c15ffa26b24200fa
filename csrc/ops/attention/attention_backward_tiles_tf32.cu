// The gradient of attention in float32 in one pass of TF32.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<float, 7>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<float, 8>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<float, 9>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
