// The gradient of attention in float32, head dims to 128, for 99 KB of shared memory.
#include "ops/attention/attention_backward_tiles.cuh"

namespace torchweld {

template void launch_attention_backward_tile<float, 7>(const BackwardArgs&, cudaStream_t);

}  // namespace torchweld
