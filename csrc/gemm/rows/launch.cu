// The launcher of the engine for few rows.
#include "gemm/rows/launch.h"

namespace torchweld {

void launch_rows_gemm(const GemmParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_rows_tiles<GemmMath::kFloat16>(p, stream);
  launch_rows_tiles<GemmMath::kBFloat16>(p, stream);
}

}  // namespace torchweld
