// The gradient of attention in float32, head dims to 256.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<float, 14>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
