// attention's forward in fp32, one TF32 pass. The kernel is in attention_forward.cuh.
#include "ops/attention/attention_forward.cuh"

namespace torchweld {

void launch_attention_tf32(int tile, const AttentionParams& params, cudaStream_t stream) {
  launch_attention_tiles<float, AttentionMath::kTf32>(tile, params, stream);
}

}  // namespace torchweld
