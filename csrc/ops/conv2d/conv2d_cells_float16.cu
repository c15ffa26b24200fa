#include "ops/conv2d/conv2d_cells.cuh"

namespace torchweld {

void launch_conv2d_cells_float16(int tile, const Conv2dParams& params, cudaStream_t stream) {
  launch_conv2d_cells_of<__half>(tile, params, stream);
}

}  // namespace torchweld
