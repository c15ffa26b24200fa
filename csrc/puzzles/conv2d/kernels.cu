// Launches the chosen kernel of a single-channel convolution.
#include "core/choices.h"
#include "core/launch.h"
#include "puzzles/conv2d/conv2d.h"
#include "puzzles/conv2d/family.h"

namespace torchweld {

void launch_conv2d(const Conv2dParams& params, cudaStream_t stream) {
  const int elem_size = params.dtype == DType::kFloat32 ? 4 : 2;
  const Conv2dChoice choice = pick<Conv2dFamily>(
      {params.batch, params.height, params.width, params.kernel_height, params.kernel_width,
       elem_size, params.flipped, params.dtype == DType::kBFloat16, device_facts()});
  switch (choice.engine) {
    case Conv2dEngine::kDirect:
      launch_conv2d_direct(params, stream);
      break;
    case Conv2dEngine::kCells:
      params.dtype == DType::kFloat16 ? launch_conv2d_cells_float16(choice.tile, params, stream)
                                      : launch_conv2d_cells_bfloat16(choice.tile, params, stream);
      break;
    case Conv2dEngine::kGeneral:
      launch_conv2d_general(params, stream);
  }
  check_launch("conv2d");
}

}  // namespace torchweld
