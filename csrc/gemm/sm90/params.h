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
  // (k, N, halves, batch), or (N, k, halves, batch); bf16x3: (k, N, terms * halves, batch). The
  // halves of a pair side by side along K have b_k_half columns each.
  TensorMap b;
  TensorMap y, preact;           // (N, M, halves, batch); y has one half
  bool stores_y, stores_preact;  // by these maps; else rows have no 16-byte boundaries
  bool a_batched, b_batched;     // one matrix a batch
  // b_reversed is 1 where b's second half is at the lower address. A tensor map has no negative
  // strides, so that half is the map's first one. A swap_ab tile has b's map as its a.
  int b_reversed;
  int b_k_half;           // INT_MAX where b's K is not in halves
  GemmSchedule schedule;  // of clusters' tiles
  StreamKSchedule stream_k;
  Sm90Partials partials;
  GemmParams gemm;
};

}  // namespace torchweld
