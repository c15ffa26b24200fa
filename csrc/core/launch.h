// Launches kernels and turns launch errors into sentences. .cu files include this header, so it
// includes no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/observe.h"

namespace torchweld {

inline void check_launch(const char* op) {
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

// The largest number of blocks along a grid's first dimension.
inline constexpr int64_t kMaxGrid = 2147483647;

// A kernel that uses more shared memory, or a larger cluster, than these limits needs a function
// attribute.
inline constexpr int kDefaultSharedBytes = 48 * 1024, kPortableCluster = 8;
// An upper bound on the static shared memory of every kernel that uses dynamic shared memory. The
// default limit counts both kinds, but launch_kernel does not know the static size.
inline constexpr int kMaxStaticBytes = 8 * 1024;

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;
  int cluster = 1;        // blocks of a cluster, along the first dimension
  bool overlaps = false;  // programmatic dependent launch (device/sm90/dependent_launch.cuh)

  // `blocks` must be at most kMaxGrid.
  Grid(int64_t blocks, dim3 threads, int shared_bytes = 0)
      : blocks(static_cast<unsigned>(blocks)), threads(threads), shared_bytes(shared_bytes) {}
};

// Launches a kernel. Call check_launch afterwards, which reports a failure.
// NOTE: function attributes belong to the current device, so they are set at every launch.
template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   Args&&... args) {
  if (is_observed()) {
    observe_launch(reinterpret_cast<const void*>(kernel),
                   static_cast<int>(grid.threads.x * grid.threads.y), grid.shared_bytes);
    if (thread_is_dry_run()) return;
  }
  if (grid.shared_bytes > kDefaultSharedBytes - kMaxStaticBytes) {
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared_bytes);
  }
  if (grid.cluster > kPortableCluster) {
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (grid.overlaps) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  (void)cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// Returns a number that memory does not hold by chance: splitmix64 of a counter. Block flags use it
// (device/block_flags.cuh).
inline uint64_t next_launch_number() {
  static std::atomic<uint64_t> launches{0};
  uint64_t x = ++launches * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Splits `items` blocks into ranges that each fit into one grid, and calls body(first, count) for
// each range.
template <typename Body>
void for_each_grid_of(int64_t items, const Body& body) {
  for (int64_t first = 0; first < items; first += kMaxGrid) {
    body(first, items - first < kMaxGrid ? items - first : kMaxGrid);
  }
}

inline void clear_memory(void* memory, int64_t bytes, cudaStream_t stream) {
  if (!is_dry_run()) (void)cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream);
}

}  // namespace torchweld
