// What the code that the current device runs was compiled for.
#include "core/launch.h"

namespace torchweld {
namespace {

__global__ void target_probe_kernel() {}

}  // namespace

// NOTE: a chip newer than the code that was compiled for it runs the PTX of an older one, where
// everything under TW_HAS_CLUSTERS is missing; the device's compute capability does not tell.
bool device_has_clusters() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return false;
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, target_probe_kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return false;
  }
  return attributes.ptxVersion >= 90;
}

}  // namespace torchweld
