// Launches the chosen kernel of attention's forward.
#include "attention/fwd.h"

#include "attention/sm90/fwd.h"
#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {
namespace {

template <bool kMasked>
void launch_sync_tile(int tile, const AttentionParams& params, cudaStream_t stream) {
  constexpr auto k16Bit = AttentionMath::k16Bit, kTf32 = AttentionMath::kTf32;
  switch (params.dtype) {
    case DType::kFloat32:
      return params.tf32 ? launch_attention_tiles<float, kTf32, kMasked>(tile, params, stream)
                         : launch_attention_split_tiles<kMasked>(tile, params, stream);
    case DType::kFloat16:
      return launch_attention_tiles<__half, k16Bit, kMasked>(tile, params, stream);
    case DType::kBFloat16:
      return launch_attention_tiles<__nv_bfloat16, k16Bit, kMasked>(tile, params, stream);
  }
}

}  // namespace

void launch_attention(const AttentionParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * sizes.seqlen_q;
  if (rows == 0 || (sizes.head_dim_v == 0 && !params.lse)) return;
  const int tile = params.choice.tile;
  const bool half = params.dtype == DType::kFloat16;
  const auto launch = [&](auto masked) {
    constexpr bool kMasked = masked.value;
    switch (params.choice.engine) {
      case AttentionEngine::kGeneral:
        return launch_attention_general<kMasked>(params, stream);
      case AttentionEngine::kSync:
        return launch_sync_tile<kMasked>(tile, params, stream);
      case AttentionEngine::kSm90:
        return dispatch_index<kNumAttentionSm90Tiles>(tile, [&](auto index) {
          half ? launch_attention_sm90_tile<__half, index.value, kMasked>(params, stream)
               : launch_attention_sm90_tile<__nv_bfloat16, index.value, kMasked>(params, stream);
        });
      case AttentionEngine::kDecode:
        return half ? launch_attention_decode<__half, kMasked>(params, stream)
                    : launch_attention_decode<__nv_bfloat16, kMasked>(params, stream);
      case AttentionEngine::kWide:
        return half ? launch_attention_wide<__half, kMasked>(params, stream)
                    : launch_attention_wide<__nv_bfloat16, kMasked>(params, stream);
      case AttentionEngine::kChain:
        return half ? launch_attention_chain<__half>(params, stream)
                    : launch_attention_chain<__nv_bfloat16>(params, stream);
    }
  };
  // In the batch-invariant mode, every call uses the masked kernel if that kernel has smaller tiles
  // of keys. Only the masked wide kernel has splits.
  const bool few_keys = params.key_grid > 1 && params.choice.engine == AttentionEngine::kSm90 &&
                        kAttentionSm90Tiles[tile].keys != params.key_grid;
  const bool wide_splits =
      params.choice.engine == AttentionEngine::kWide && params.choice.splits > 1;
  dispatch_bools(launch, params.mask.is_general() || few_keys || wide_splits);
  check_launch("attention");
}

}  // namespace torchweld
