// What the code that the current device runs was compiled for.
#include "core/launch.h"
#include "device/sm90/wgmma.cuh"

namespace torchweld {
namespace {

constexpr int kOtherThreads = 32, kWarpgroupThreads = 128;

// NOTE: its most threads tell the host whether this code may have products of warpgroups. The PTX
// version does not: sm_90a and sm_90 have the same.
__global__ void __launch_bounds__(TW_HAS_WARPGROUPS ? kWarpgroupThreads : kOtherThreads)
    target_probe_kernel() {}

// All zeros where the device can't run it.
cudaFuncAttributes probe_attributes() {
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, target_probe_kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return {};
  }
  return attributes;
}

}  // namespace

// NOTE: a chip newer than the code that was compiled for it runs the PTX of an older one, where
// everything under TW_HAS_CLUSTERS is missing; the device's compute capability does not tell.
bool device_has_clusters() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return false;
  return probe_attributes().ptxVersion >= 90;
}

bool device_has_warpgroups() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return false;
  return probe_attributes().maxThreadsPerBlock == kWarpgroupThreads;
}

}  // namespace torchweld
