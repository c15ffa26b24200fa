// What the host hands to the kernels on wgmma and TMA. Torch-free.
#pragma once

#include "device/sm90/tensor_map.h"
#include "gemm/gemm.h"
#include "gemm/schedule.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace torchweld {

struct Sm90Params {
  // (k, M, 1, batch), or (M, k, 1, batch) where MN-major; bf16x3: (k, M, terms, batch).
  TensorMap a;
  // (k, N, halves, batch), or (N, k, halves, batch); bf16x3: (k, N, terms * halves, batch).
  TensorMap b;
  TensorMap y, preact;           // (N, M, halves, batch); y has one half
  bool stores_y, stores_preact;  // by these maps; else rows have no 16-byte boundaries
  bool a_batched, b_batched;     // one matrix a batch
  GemmSchedule schedule;         // of clusters' tiles
  StreamKSchedule stream_k;
  Sm90Partials partials;
  GemmParams gemm;
};

}  // namespace torchweld
