// How every kernel is launched, and launch errors as sentences. Included by .cu files, so it knows
// no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/watch.h"

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

// The most blocks of a grid's first dimension.
inline constexpr int64_t kMaxGrid = 2147483647;

// What a block may have of shared memory without asking, and of a cluster on every chip that has
// clusters.
inline constexpr int kSharedBytesUnasked = 48 * 1024, kPortableCluster = 8;

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;
  int cluster = 1;        // blocks along the first dimension that work together
  bool overlaps = false;  // programmatic dependent launch (device/sm90/dependent_launch.cuh)

  // `blocks` fit a grid.
  Grid(int64_t blocks, dim3 threads, int shared_bytes = 0)
      : blocks(static_cast<unsigned>(blocks)), threads(threads), shared_bytes(shared_bytes) {}
};

// A failure stays behind for check_launch.
// NOTE: permissions belong to the current device, so they are asked for at every launch.
template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   Args&&... args) {
  if (is_observed()) {
    observe_launch(reinterpret_cast<const void*>(kernel),
                   static_cast<int>(grid.threads.x * grid.threads.y), grid.shared_bytes);
    if (this_thread_runs_dry()) return;
  }
  if (grid.shared_bytes > kSharedBytesUnasked) {
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

// A number that no memory holds by chance: splitmix64 of a count (device/block_flags.cuh).
inline uint64_t next_launch_number() {
  static std::atomic<uint64_t> launches{0};
  uint64_t x = ++launches * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Calls body(first, count) with as many of `items` blocks as one grid can hold at a time.
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
