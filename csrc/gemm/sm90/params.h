// What the host hands to the kernels on wgmma and TMA. Torch-free.
#pragma once

#include "device/sm90/tensor_map.h"
#include "gemm/gemm.h"
#include "gemm/schedule.cuh"
#include "gemm/sm90/parts.cuh"
#include "gemm/sm90/walk.cuh"

namespace torchweld {

struct Sm90Params {
  // (k, M, 1, batch), or (M, k, 1, batch) where MN-major; of pieces (k, M, pieces, batch).
  TensorMap a;
  // (k, N, halves, batch), or (N, k, halves, batch); of pieces (k, N, pieces * halves, batch).
  TensorMap b;
  TensorMap y, preact;           // (N, M, halves, batch); y has one half
  bool stores_y, stores_preact;  // by these maps; else rows have no 16-byte boundaries
  bool a_batched, b_batched;     // one matrix a batch
  GemmSchedule schedule;         // of clusters' tiles
  StreamKSchedule deal;
  Sm90Partials parts;
  GemmParams gemm;
};

}  // namespace torchweld
