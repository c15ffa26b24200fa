// attention's forward in fp32, to its accuracy. The kernel is in attention_forward_split.cuh.
#include "ops/attention/attention_forward_split.cuh"

namespace torchweld {
namespace {

template <int kTile = 0>
void launch_tiles(int tile, const AttentionParams& params, cudaStream_t stream) {
  if constexpr (kTile < kNumAttentionTiles) {
    if constexpr (kAttentionTiles[kTile].math == AttentionMath::kFloat32) {
      using Config = AttentionSplitConfig<kTile>;
      if (tile == kTile) {
        return launch_attention_blocks<Config, sizeof(AttentionSplitShared<Config>)>(
            attention_split_kernel<Config>, params, stream);
      }
    }
    launch_tiles<kTile + 1>(tile, params, stream);
  }
}

}  // namespace

void launch_attention_float32(int tile, const AttentionParams& params, cudaStream_t stream) {
  launch_tiles(tile, params, stream);
}

}  // namespace torchweld
