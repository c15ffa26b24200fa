// attention's forward in fp32, three TF32 passes. The kernel is in attention_forward.cuh.
#include "ops/attention/attention_forward.cuh"

namespace torchweld {

void launch_attention_fp32(int tile, const AttentionParams& params, cudaStream_t stream) {
  launch_attention_tiles<float, true>(tile, params, stream);
}

}  // namespace torchweld
