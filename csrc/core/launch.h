// Launch errors as sentences. Included by .cu files, so it knows no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace torchweld {

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  std::string text = std::string("torchweld::") + op +
                     ": the kernel could not be launched: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    text += "; the library has no code for this GPU, rebuild it with TORCH_CUDA_ARCH_LIST set";
  }
  throw std::runtime_error(text);
}

// The most blocks of a grid's first dimension.
inline constexpr int64_t kMaxGrid = 2147483647;

// An attribute of the current device, 0 where there is none.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// True where the current device has thread-block clusters and bulk copies, and runs code that was
// compiled with them (device/target.cu).
bool device_has_clusters();

// The same for the products of warpgroups, which only Hopper has.
bool device_has_warpgroups();

// True where the current device has room for a cluster of 16 blocks that have an SM each.
bool device_fits_clusters_of_16();

// Lets a kernel have more shared memory than the 48 KiB that need no asking.
// NOTE: the permission belongs to the current device, so it is asked for at every launch.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes <= 48 * 1024) return;
  // A failure stays behind for check_launch.
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Lets a kernel have clusters of more than the 8 blocks that fit on every chip with clusters.
template <typename Kernel>
void allow_any_cluster(Kernel* kernel) {
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace torchweld
