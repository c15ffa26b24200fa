// One launcher per kind of arithmetic and size of tiles, each in a file of its own
// (csrc/instantiations.py).
#pragma once

#include "core/launch.h"
#include "gemm/gemm.h"

namespace torchweld {

template <GemmMath kMath, GemmSize kSize>
void launch_gemm_size(const GemmParams& params, cudaStream_t stream);

template <GemmMath kMath>
void launch_gemm_math(const GemmParams& params, cudaStream_t stream) {
  switch (kGemmTiles[params.choice.tile].size()) {
    case GemmSize::kLarge:
      // No tile of kFloat32 is large.
      if constexpr (kMath != GemmMath::kFloat32) {
        launch_gemm_size<kMath, GemmSize::kLarge>(params, stream);
      }
      return;
    case GemmSize::kMedium:
      return launch_gemm_size<kMath, GemmSize::kMedium>(params, stream);
    case GemmSize::kSmall:
      return launch_gemm_size<kMath, GemmSize::kSmall>(params, stream);
  }
}

}  // namespace torchweld
