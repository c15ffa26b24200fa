// What the code that the current device runs was compiled for.
#include "core/launch.h"

#include <map>
#include <mutex>

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

bool fits_clusters_of_16() {
  const int shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  allow_shared_memory(target_probe_kernel, shared);
  allow_any_cluster(target_probe_kernel);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {16, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(16);
  config.blockDim = dim3(kOtherThreads);
  config.dynamicSmemBytes = shared;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int most = 0;
  const bool known =
      cudaOccupancyMaxActiveClusters(&most, target_probe_kernel, &config) == cudaSuccess;
  (void)cudaGetLastError();  // a device that refuses the question fits none
  return known && most > 0;
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

// NOTE: a cluster stays within one part of the chip, and chips of one kind have different SMs
// switched off: only the device itself can tell. It is asked once.
bool device_fits_clusters_of_16() {
  static std::mutex mutex;
  static std::map<int, bool>* const fits = new std::map<int, bool>;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = fits->find(device);
  if (known != fits->end()) return known->second;
  return (*fits)[device] = device_has_clusters() && fits_clusters_of_16();
}

}  // namespace torchweld
