// The tiles of the engine for products with up to 16 rows of operand a. The engine needs sm_80 or
// newer. Its smallest tile needs 103 KiB of shared memory per block. The A100, the H100 and newer
// data-centre GPUs have that much. This is pure host code.
#pragma once

#include <algorithm>

#include "core/index.h"
#include "core/refusal.h"
#include "gemm/problem.h"

namespace torchweld {

// A block multiplies all rows of a by `columns` rows of b. The k-blocks are assigned to the warps
// of the block in round-robin order. In a tile with `chain`, each warp instead multiplies 8 columns
// by all of K, and the warps share one ring with stages of kChainKBlocks k-blocks.
struct RowsTile {
  int columns;  // the number of rows of b per block; if gated, it counts both halves
  int stages;   // the number of stages in each ring
  int blocks_per_sm;
  float bytes_per_ns;  // the estimated memory throughput of one SM; rows_seconds uses this estimate
  bool chain = false;  // whether every sum is one chain along K

  static constexpr int kRows = 16, kWarps = 8, kThreads = 32 * kWarps, kChainKBlocks = 4;
  constexpr int warps() const { return chain ? columns / 8 : kWarps; }
  // The kernel can normalise the rows of a only if K is at most kMaxNormed.
  static constexpr int kMaxNormed = 1536;
  // The number of bytes of one stage. A stage holds one k-block of b, of a, and of the norm's scale
  // and shift.
  constexpr int stage_bytes() const { return (columns + kRows + 2) * kKBlockBytes; }
  // The number of bytes of shared memory of a block. This memory holds all stages of all warps, and
  // the statistics of 16 rows.
  constexpr int shared_bytes() const {
    if (chain) return stages * kChainKBlocks * (columns + kRows) * kKBlockBytes;
    return kWarps * stages * stage_bytes() + kRows * 16;
  }
  constexpr int64_t blocks(const GemmProblem& p) const { return divide_up(p.width(), columns); }
};

// Each entry lists columns, stages, blocks_per_sm and bytes_per_ns.
inline constexpr RowsTile kRowsTiles[] = {
    {16, 3, 2, 86}, {32, 3, 1, 93}, {64, 2, 1, 90}, {32, 4, 2, 130, true}};
inline constexpr int kRowsTileCount = sizeof(kRowsTiles) / sizeof(kRowsTiles[0]);

inline Refusal rows_refusal(const GemmProblem& p, const RowsTile& tile, int splits) {
  // The largest supported K. This limit exists because the kernel counts K in 32 bits.
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  if (gemm_elem_size(p.math) != 2) return "the engine for few rows needs 16-bit operands";
  if (tile.chain != p.invariant) return kOtherSums;
  if (tile.chain && p.normed) return kNoNorm;
  if (tile.chain && !p.b_k_major) return "the tile needs a K-major second operand";
  if (p.m > RowsTile::kRows) return {"M is more than {}", RowsTile::kRows};
  if (p.batch > 1) return "the engine for few rows has no batch";
  if (p.grouped != Grouped::kNone) return "the engine for few rows has no groups";
  if (!p.a_k_major) return "the engine for few rows needs a K-major first operand";
  if (splits != 1) return "the engine for few rows splits K within a block";
  if (p.normed && (p.k == 0 || p.k % 8 != 0)) {
    return "a norm in front needs rows of whole 16-byte chunks";
  }
  if (p.normed && p.k > RowsTile::kMaxNormed) {
    return {"the rows to be normalised have more than {} columns", RowsTile::kMaxNormed};
  }
  if (p.k > kMaxSize) return {"K is more than {}", kMaxSize};
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  return grid_fits(static_cast<double>(p.width()) / tile.columns + 1) ? Refusal()
                                                                      : "more than 2^31 - 1 tiles";
}

// Estimates the time of the kernel. The launch and the first loads are left out. The main part is
// the longer of two times: the time to read b once from memory or L2, at kMemoryBytes per second,
// and the time in which the busiest SM reads the operands of its blocks. A norm adds kNormUs once,
// and kBlockNormUs for every block of the busiest SM. The constants and those of sm90::tile_seconds
// were fitted together, on an H200.
inline double rows_seconds(const GemmProblem& p, const RowsTile& tile) {
  constexpr double kMemoryBytes = 8.7e12, kBlockUs = 0.64, kPointwiseUs = 0.1;
  constexpr double kNormUs = 1.5, kBlockNormUs = 0.5;
  const auto sm_blocks = static_cast<double>(divide_up(tile.blocks(p), int64_t{p.device.sms}));
  const double row_bytes = static_cast<double>(p.k) * 2;
  const double seconds = std::max(sm_blocks * row_bytes * (tile.columns + RowsTile::kRows) /
                                      (static_cast<double>(tile.bytes_per_ns) * 1e9),
                                  static_cast<double>(p.width()) * row_bytes / kMemoryBytes);
  // The k16 steps of a chain wait for each other. The tensor cores need kStepNs for one step.
  constexpr double kStepNs = 20;
  const double rounds =
      static_cast<double>(divide_up(tile.blocks(p), int64_t{p.device.sms} * tile.blocks_per_sm));
  const double chain = tile.chain ? rounds * static_cast<double>(p.k) / 16 * kStepNs * 1e-9 : 0;
  const double beside_us = kBlockUs + (p.pointwise ? kPointwiseUs : 0) +
                           (p.normed ? kNormUs + sm_blocks * kBlockNormUs : 0);
  return std::max(seconds, chain) + beside_us * 1e-6;
}

}  // namespace torchweld
