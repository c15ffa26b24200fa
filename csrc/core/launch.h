// Launches kernels and reports launch errors as sentences. Most .cu files include this header, so
// it includes neither torch nor strings.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "core/observe.h"

namespace torchweld {

// Raises an error if the last launch failed. `op` is the name of the op for the message.
void check_launch(const char* op);

// The largest number of blocks along a grid's first dimension.
inline constexpr int64_t kMaxGrid = 2147483647;

// If a kernel uses more shared memory or a larger cluster than these limits, a function attribute
// must be set before its launch.
inline constexpr int kDefaultSharedBytes = 48 * 1024, kPortableCluster = 8;
// An upper bound on the static shared memory of every kernel that uses dynamic shared memory. The
// limit kDefaultSharedBytes counts static and dynamic shared memory, but launch_kernel does not
// know the static shared memory of a kernel.
inline constexpr int kMaxStaticBytes = 8 * 1024;

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;
  int cluster = 1;        // the number of blocks per cluster, along the first dimension
  bool overlaps = false;  // whether to use programmatic dependent launch

  // `blocks` must be at most kMaxGrid.
  Grid(int64_t blocks, dim3 threads, int shared_bytes = 0)
      : blocks(static_cast<unsigned>(blocks)), threads(threads), shared_bytes(shared_bytes) {}
};

// Launches a kernel. The caller must call check_launch afterwards, which reports an error of the
// launch.
// NOTE: the function attributes are set at every launch, because an attribute applies only to the
// current device.
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

// Returns a new number for each launch. It is the splitmix64 of a counter, so memory is very
// unlikely to hold it by chance. Block flags use this number (device/block_flags.cuh).
inline uint64_t next_launch_number() {
  static std::atomic<uint64_t> launches{0};
  uint64_t x = ++launches * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Splits `items` blocks into ranges of at most kMaxGrid blocks, the limit of a grid. Calls
// body(first, count) for each range.
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
