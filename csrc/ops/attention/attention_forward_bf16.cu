// attention's forward in bf16. The kernel is in attention_forward.cuh.
#include "ops/attention/attention_forward.cuh"

namespace torchweld {

void launch_attention_bf16(int tile, const AttentionParams& params, cudaStream_t stream) {
  launch_attention_tiles<__nv_bfloat16, AttentionMath::k16Bit>(tile, params, stream);
}

}  // namespace torchweld
