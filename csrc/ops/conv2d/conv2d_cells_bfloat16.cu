#include "ops/conv2d/conv2d_cells.cuh"

namespace torchweld {

void launch_conv2d_cells_bfloat16(int tile, const Conv2dParams& params, cudaStream_t stream) {
  launch_conv2d_cells_of<__nv_bfloat16>(tile, params, stream);
}

}  // namespace torchweld
