// The parameters that the host passes to the kernels on wgmma and TMA. This header does not use
// torch.
#pragma once

#include "device/sm90/tensor_map.h"
#include "gemm/gemm.h"
#include "gemm/schedule.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace torchweld {

struct Sm90Params {
  // Dims (k, M, 1, batch), or (M, k, 1, batch) if MN-major. With bf16x3: (k, M, terms, batch).
  TensorMap a;
  // Dims (k, N, halves, batch), or (N, k, halves, batch) if MN-major. With bf16x3: (k, N, terms *
  // halves, batch).
  TensorMap b;
  TensorMap y, preact;  // dims (N, M, halves, batch); y has one half
  // Whether TMA stores the result. It can't if the rows don't start on 16-byte boundaries.
  bool stores_y, stores_preact;
  bool a_batched, b_batched;  // false: all batches read the same matrix
  GemmSchedule schedule;      // of the tiles of clusters
  StreamKSchedule stream_k;
  Sm90Partials partials;
  GemmParams gemm;
};

}  // namespace torchweld
