// attention's forward in fp32, to its accuracy. The kernel is in attention_forward_split.cuh.
#include "device/dispatch.cuh"
#include "ops/attention/attention_forward_split.cuh"

namespace torchweld {

void launch_attention_float32(int tile, const AttentionParams& params, cudaStream_t stream) {
  dispatch_index<kNumAttentionTiles>(tile, [&](auto index) {
    if constexpr (kAttentionTiles[index.value].math == AttentionMath::kFloat32) {
      using Config = AttentionSplitConfig<index.value>;
      launch_attention_blocks<Config, sizeof(AttentionSplitShared<Config>)>(
          attention_split_kernel<Config>, params, stream);
    }
  });
}

}  // namespace torchweld
