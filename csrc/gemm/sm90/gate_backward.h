// The interface of the matmul whose epilogue computes the gradient of a gate. This header does not
// use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

// The weights of the rows of a grouped product, and the parts of their gradients. Every tile of
// columns adds up dact * act over its columns.
struct RouteWeights {
  const int* order;  // row r has the weight weight[order[r]]; nullptr if rows have no weights
  const void* weight;
  bool fp32;  // whether the weights are fp32; otherwise they have the dtype of the operands
  float* dweight_parts;  // output (weight_gradient_parts(N), M); nullptr if not needed
};
constexpr int64_t weight_gradient_parts(int64_t n) {
  return divide_up(n, sm90::kTiles[sm90::kPingPong128x128Cluster2].block_n);
}

// Let act = gate(left, right). The product a @ b^T is the gradient with respect to act. The kernel
// computes this product but does not store it. From the accumulators and the values of left and
// right, it computes the gradients of left and right. z (M, 2N) holds left and right side by side.
// dz (M, 2N) receives their gradients; dz may be the same memory as z. act (M, N) receives the
// result of the gate.
struct GateBackwardMatmulParams {
  GemmParams gemm;  // has 16-bit operands (a K-major, b MN-major), no bias and no y
  Gate gate;
  const void* z;
  void* dz;
  void* act;  // nullptr if the caller does not need act
  // For a product with groups of rows, whose gate is swiglu: act and dz are multiplied by the
  // weights of the rows.
  RouteWeights weights;
};

// The tile of the kernel. One warpgroup runs its epilogue, which waits for memory, while the other
// warpgroup multiplies. The epilogue has two pairs of boxes per warp, so that a warp can load one
// pair while it computes the gradients of the other pair. The memory of these boxes limits the tile
// to five stages.
constexpr sm90::Tile gate_backward_tile() {
  sm90::Tile tile = sm90::kTiles[sm90::kPingPong128x128Cluster2];
  tile.stages = 5;
  tile.boxes = 4;
  return tile;
}

// Returns why the kernel does not support a product, or an empty refusal if it does.
inline Refusal gate_backward_refusal(const GemmProblem& p) {
  if (p.math != GemmMath::kFloat16 && p.math != GemmMath::kBFloat16) {
    return "the kernel is only for 16-bit dtypes";
  }
  if (!p.a_k_major || p.b_k_major) {
    return "the kernel needs a K-major first operand and an MN-major second operand";
  }
  if (p.batch != 1 && p.grouped != Grouped::kRows) return "the kernel has no batch";
  if (p.n % 8 != 0) return "the rows of the gradients must start on 16-byte boundaries";
  return sm90::tile_refusal(p, gate_backward_tile(), /*streams=*/false);
}

// Returns the time to transfer `values` values per element of y from or to memory. kBytesPerSecond
// was measured on an H100, with the pointwise pass of gate_backward over (16384, 8192) bfloat16.
inline double gate_transfer_seconds(const GemmProblem& p, int values) {
  constexpr double kBytesPerSecond = 2.9e12;
  const double elements = static_cast<double>(p.m) * static_cast<double>(p.n);
  return elements * values * gemm_elem_size(p.math) / kBytesPerSecond;
}

// Predicts the time of the kernel. The mainloops hide the epilogues as far as the memory keeps up.
// Therefore the result is the time of the mainloops or the time of the memory transfers, whichever
// is longer. An epilogue reads left and right, and writes their gradients and act.
inline double gate_backward_seconds(const GemmProblem& p) {
  GemmProblem pointwise = p;
  pointwise.pointwise = true;
  return std::max(sm90::tile_seconds(pointwise, gate_backward_tile(), /*streams=*/false),
                  gate_transfer_seconds(p, 5));
}

// Launches the kernel. All sizes must be at least 1.
void launch_gate_backward_matmul(const GateBackwardMatmulParams& params, cudaStream_t stream);

}  // namespace torchweld
