// Reports an error of a launch as a sentence.
#ifdef TORCHWELD_CUDA
#include "core/launch.h"

#include <stdexcept>
#include <string>

namespace torchweld {

void check_launch(const char* op) {
  if (is_dry_run()) return;
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  std::string text = std::string("torchweld::") + op +
                     ": the kernel could not be launched: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    text += "; the library has no code for this GPU, rebuild it with TORCH_CUDA_ARCH_LIST set";
  }
  throw std::runtime_error(text);
}

}  // namespace torchweld
#endif
