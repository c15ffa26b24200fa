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

// True where the current device runs thread-block clusters.
inline bool device_has_clusters() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

}  // namespace torchweld
