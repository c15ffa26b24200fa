// What the host hands to the kernels on wgmma and TMA. Torch-free.
#pragma once

#include "device/sm90/tensor_map.h"
#include "gemm/gemm.h"
#include "gemm/schedule.cuh"
#include "gemm/sm90/parts.cuh"
#include "gemm/sm90/walk.cuh"

namespace torchweld {

// A norm of a's rows, whose results a's map is of (norm.cuh).
struct Sm90Norm {
  static constexpr int kCounters = 2;  // rows that are claimed, blocks that have ended

  const void* x;
  int64_t x_row_stride;
  uint32_t* counters;   // those, then of every block_m rows how many are there; nullptr: no norm
  uint32_t first_rows;  // that the blocks' first tiles want
};

struct Sm90Params {
  // (k, M, 1, batch), or (M, k, 1, batch) where MN-major; of pieces (k, M, pieces, batch).
  TensorMap a;
  // (k, N, halves, batch), or (N, k, halves, batch); of pieces (k, N, pieces * halves, batch).
  TensorMap b;
  TensorMap y, preact;           // (N, M, halves, batch); y has one half
  bool stores_y, stores_preact;  // by these maps; else rows have no 16-byte boundaries
  bool a_batched, b_batched;     // one matrix a batch
  GemmSchedule schedule;         // of clusters' tiles
  Sm90Deal deal;
  Sm90Parts parts;
  Sm90Norm norm;
  GemmParams gemm;
};

}  // namespace torchweld
