// The parameters that the host passes to the kernels on wgmma and TMA. This header does not use
// torch.
#pragma once

#include "device/sm90/tensor_map.h"
#include "gemm/gemm.h"
#include "gemm/schedule.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace torchweld::sm90 {

struct KernelParams {
  // The tensor map of a (in a swap_ab tile: of b). For a, the dims are (K, M, 1, batch), or
  // (M, K, 1, batch) if a is MN-major. For bf16x3 they are (K, M, terms, batch).
  TensorMap a;
  // The tensor map of b (in a swap_ab tile: of a). For b, the dims are (K, N, halves, batch), or
  // (N, K, halves, batch) if b is MN-major. For bf16x3 they are (K, N, terms * halves, batch). In a
  // gated product, the halves of b are the left and the right matrix. If b is a pair that is
  // concatenated along K, the halves are its two matrices, each with b_k_half columns.
  TensorMap b;
  // The dims of y are (N, M, 1, batch). The dims of preact are (N, M, halves, batch), or
  // (2N, M, 1, batch) if left and right columns of preact alternate.
  TensorMap y, preact;
  // Whether TMA stores y and the pre-activation. TMA can't store a matrix whose rows don't start on
  // 16-byte boundaries.
  bool stores_y, stores_preact;
  bool a_batched, b_batched;  // false if all batches read the same matrix
  // 1 if the second half of b has a lower address than the first half, else 0. A tensor map can't
  // have negative strides. Therefore, if b_reversed is 1, the first half of the tensor map is the
  // second half of b.
  int b_reversed;
  // If b is a pair that is concatenated along K, b_k_half is the number of columns of each of its
  // two matrices. Otherwise b_k_half is INT_MAX.
  int b_k_half;
  GemmSchedule schedule;  // the order of the tiles; the tiles of a cluster count as one tile
  StreamKSchedule stream_k;
  Partials partials;
  GemmParams gemm;
  // The tensor maps of the second and the third segment, if K is the concatenation of several
  // segments (GemmSegments). more_k holds the first column along K of each of these segments, or
  // INT_MAX for a missing segment.
  TensorMap more_a[kMaxKSegments - 1], more_b[kMaxKSegments - 1];
  int more_k[kMaxKSegments - 1];
};

}  // namespace torchweld::sm90
