// How every kernel of a product with a 4-bit weight is launched.
#pragma once

#include "core/choices.h"
#include "core/launch.h"

namespace torchweld {

struct Int4Grid {
  int64_t blocks, rows_of_blocks;
  int threads, shared_bytes;
  int cluster;    // neighbouring blocks that work together; 1 where the device has no clusters
  bool overlaps;  // begins while the kernel before it ends (device/sm90/overlap.cuh)
};

// A failure stays behind for check_launch.
template <typename... Params>
void launch_int4_grid(void (*kernel)(Params...), const Int4Grid& grid, cudaStream_t stream,
                      const Params&... params) {
  allow_shared_memory(kernel, grid.shared_bytes);
  note_kernel(kernel, grid.threads, grid.shared_bytes);
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (grid.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.rows_of_blocks));
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  (void)cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace torchweld
