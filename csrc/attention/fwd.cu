// attention's forward: from a problem to the kernel that takes it.
#include "attention/fwd.h"

#include "attention/sm90/fwd.h"
#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {
namespace {

template <typename Params>
void launch_tile(int tile, const Params& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat32:
      return params.tf32 ? launch_attention_tf32(tile, params, stream)
                         : launch_attention_float32(tile, params, stream);
    case DType::kFloat16:
      return launch_attention_float16(tile, params, stream);
    case DType::kBFloat16:
      return launch_attention_bfloat16(tile, params, stream);
  }
}

template <typename Params>
void launch_sm90_tile(int tile, const Params& params, cudaStream_t stream) {
  dispatch_index<kNumAttentionSm90Tiles>(tile, [&](auto index) {
    params.dtype == DType::kFloat16
        ? launch_attention_sm90_tile<__half, index.value>(params, stream)
        : launch_attention_sm90_tile<__nv_bfloat16, index.value>(params, stream);
  });
}

// Params of a call with or without a mask.
template <typename Params>
void launch_choice(const Params& params, cudaStream_t stream) {
  switch (params.choice.engine) {
    case AttentionEngine::kGeneral:
      launch_attention_general(params, stream);
      break;
    case AttentionEngine::kSync:
      launch_tile(params.choice.tile, params, stream);
      break;
    case AttentionEngine::kSm90:
      launch_sm90_tile(params.choice.tile, params, stream);
      break;
    case AttentionEngine::kDecode:
      if (params.dtype == DType::kFloat16) {
        launch_attention_decode_float16(params, stream);
      } else {
        launch_attention_decode_bfloat16(params, stream);
      }
      break;
  }
}

}  // namespace

void launch_attention(const MaskedAttentionParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * sizes.seqlen_q;
  if (rows == 0 || (sizes.head_dim_v == 0 && !params.lse)) return;
  if (params.mask.given()) {
    launch_choice(params, stream);
  } else {
    launch_choice<AttentionParams>(params, stream);
  }
  check_launch("attention");
}

}  // namespace torchweld
