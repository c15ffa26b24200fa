// The launcher of the engine on mma.sync.
#include "gemm/sync/launch.h"

namespace torchweld {
namespace {

template <GemmMath kMath>
void launch_sync_math(const GemmParams& params, cudaStream_t stream) {
  switch (kSyncTiles[params.choice.tile].size()) {
    case SyncSize::kLarge:
      // kFloat32 has no large tile.
      if constexpr (kMath != GemmMath::kFloat32) {
        launch_sync_size<kMath, SyncSize::kLarge>(params, stream);
      }
      return;
    case SyncSize::kMedium:
      return launch_sync_size<kMath, SyncSize::kMedium>(params, stream);
    case SyncSize::kSmall:
      return launch_sync_size<kMath, SyncSize::kSmall>(params, stream);
  }
}

}  // namespace

void launch_sync_gemm(const GemmParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch_sync_math<GemmMath::kFloat16>(p, stream);
    case DType::kBFloat16:
      return launch_sync_math<GemmMath::kBFloat16>(p, stream);
    case DType::kFloat32:
      return p.tf32 ? launch_sync_math<GemmMath::kTf32>(p, stream)
                    : launch_sync_math<GemmMath::kFloat32>(p, stream);
  }
}

}  // namespace torchweld
