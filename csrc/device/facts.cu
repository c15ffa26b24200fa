// Queries the features of the current device. A feature counts only if the code that was compiled
// for the device can use it.
#include "core/device.h"

#include <atomic>
#include <mutex>

#include "core/observe.h"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

namespace {

constexpr int kOtherThreads = 32, kWarpgroupThreads = 128;

// NOTE: the host reads the launch bound of this kernel to find out whether the code that runs on
// this device was compiled with wgmma. The PTX version does not help, because sm_90a and sm_90 have
// the same PTX version.
__global__ void __launch_bounds__(TW_HAS_WGMMA ? kWarpgroupThreads : kOtherThreads)
    target_probe_kernel() {}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

int active_clusters(int blocks, int shared) {
  (void)cudaFuncSetAttribute(target_probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared);
  (void)cudaFuncSetAttribute(target_probe_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                             1);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kOtherThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  const bool known =
      cudaOccupancyMaxActiveClusters(&clusters, target_probe_kernel, &config) == cudaSuccess;
  return known ? clusters : 0;
}

// NOTE: the compute capability of the device does not say which features the code can use. A GPU
// that is newer than the compiled code may run PTX of an older architecture. Such PTX does not
// contain the code under TW_HAS_CLUSTERS.
DeviceFacts ask(int device) {
  DeviceFacts facts;
  facts.sms = attribute(cudaDevAttrMultiProcessorCount, device);
  facts.shared_limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  cudaFuncAttributes probe = {};
  if (cudaFuncGetAttributes(&probe, target_probe_kernel) != cudaSuccess) probe = {};
  facts.clusters = facts.tma = major >= 9 && probe.ptxVersion >= 90;
  facts.wgmma = major == 9 && facts.tma && probe.maxThreadsPerBlock == kWarpgroupThreads;
  facts.active_clusters[1] = facts.sms;
  for (const int blocks : {2, 3, 4, 8, 16}) {
    if (!facts.clusters) break;
    facts.active_clusters[blocks] = active_clusters(blocks, facts.shared_limit);
  }
  facts.clusters_of_16 = facts.active_clusters[16] > 0;
  // Clears the error of a failed query. The result of the query is 0, and the kernel launch reports
  // the error again.
  (void)cudaGetLastError();
  return facts;
}

}  // namespace

const DeviceFacts& device_facts() {
  static const DeviceFacts none;
  if (is_dry_run()) return *assumed_device_facts();
  constexpr int kMaxDevices = 64;
  static std::atomic<const DeviceFacts*> known[kMaxDevices];
  static std::mutex mutex;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) {
    (void)cudaGetLastError();  // clears the error of cudaGetDevice; the launch reports it again
    return none;
  }
  if (const DeviceFacts* facts = known[device].load(std::memory_order_acquire)) return *facts;
  const std::lock_guard<std::mutex> lock(mutex);
  const DeviceFacts* facts = known[device].load(std::memory_order_relaxed);
  // NOTE: the DeviceFacts object is never deleted, because other threads may still launch kernels
  // while the process ends.
  if (facts == nullptr) known[device].store(facts = new DeviceFacts(ask(device)));
  return *facts;
}

}  // namespace torchweld
