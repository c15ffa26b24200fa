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
  // The dims are (k, M, 1, batch), or (M, k, 1, batch) if a is MN-major. With bf16x3 they are (k,
  // M, terms, batch).
  TensorMap a;
  // The dims are (k, N, halves, batch), or (N, k, halves, batch) if b is MN-major. With bf16x3 they
  // are (k, N, terms * halves, batch). If b is a pair along K, its halves have b_k_half columns
  // each.
  TensorMap b;
  TensorMap y, preact;  // the dims are (N, M, halves, batch); y has one half
  // Whether TMA stores the result. TMA can't store it if its rows don't start on 16-byte
  // boundaries.
  bool stores_y, stores_preact;
  bool a_batched, b_batched;  // false if all batches read the same matrix
  // 1 if the second half of b has the lower address, else 0. A tensor map can't have negative
  // strides, so the map's first half is then the second half of b. In a swap_ab tile, the member
  // `a` is the map of b.
  int b_reversed;
  int b_k_half;           // INT_MAX if b is not a pair along K
  GemmSchedule schedule;  // the order of the tiles; a cluster computes a tile
  StreamKSchedule stream_k;
  Sm90Partials partials;
  GemmParams gemm;
};

}  // namespace torchweld
