// The gradient of attention in float32, head dims to 64.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<float, 10>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_tile<float, 11>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
