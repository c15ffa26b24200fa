// The tiles of the engine for up to 16 rows of a, for chips of sm_80 and newer whose blocks may
// have 103 KiB of shared memory: A100, H100 and newer ones of their size. Pure host code.
#pragma once

#include <algorithm>

#include "core/family.h"
#include "core/index.h"
#include "gemm/problem.h"

namespace torchweld {

// A block multiplies all rows of a by some of b; its warps multiply k-blocks in round-robin order.
struct RowsTile {
  int columns;  // rows of b, both halves of a gated product
  int stages;   // of each warp's ring in shared memory
  int blocks_per_sm;
  float bytes_per_ns;  // that an SM reads

  static constexpr int kRows = 16, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kMaxNormed = 1536;  // columns of a row that a norm goes in front of
  // Bytes of a k-block: b, a, and the scale and shift of a norm of a's rows.
  constexpr int stage_bytes() const { return (columns + kRows + 2) * kKBlockBytes; }
  // Bytes of all stages, and of the statistics of the rows.
  constexpr int shared_bytes() const { return kWarps * stages * stage_bytes() + kRows * 16; }
  constexpr int64_t blocks(const GemmProblem& p) const { return divide_up(p.width(), columns); }
};

// columns, stages, blocks_per_sm, bytes_per_ns
inline constexpr RowsTile kRowsTiles[] = {{16, 3, 2, 100}, {32, 3, 1, 100}, {64, 2, 1, 70}};
inline constexpr int kRowsTileCount = sizeof(kRowsTiles) / sizeof(kRowsTiles[0]);

inline Refusal rows_refusal(const GemmProblem& p, const RowsTile& tile, int splits) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // K is counted in 32 bits
  if (gemm_elem_size(p.math) != 2) return "the engine for few rows needs 16-bit operands";
  if (p.m > RowsTile::kRows) return {"M is more than {}", RowsTile::kRows};
  if (p.batch > 1) return "the engine for few rows has no batch";
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

// A model of the time, fitted on an H200 beside that of the sm90 engine: the reads of the memory or
// of the busiest SM, without the launch and the first loads; b may be in L2. A norm adds a constant
// to every block that an SM runs.
inline double rows_seconds(const GemmProblem& p, const RowsTile& tile) {
  constexpr double kMemoryBytes = 7e12, kBlockUs = 1, kPointwiseUs = 0.1;
  constexpr double kNormUs = 1.5, kBlockNormUs = 0.5;
  const auto sm_blocks = static_cast<double>(divide_up(tile.blocks(p), int64_t{p.device.sms}));
  const double row_bytes = static_cast<double>(p.k) * 2;
  const double seconds = std::max(sm_blocks * row_bytes * (tile.columns + RowsTile::kRows) /
                                      (static_cast<double>(tile.bytes_per_ns) * 1e9),
                                  static_cast<double>(p.width()) * row_bytes / kMemoryBytes);
  const double beside_us = kBlockUs + (p.pointwise ? kPointwiseUs : 0) +
                           (p.normed ? kNormUs + sm_blocks * kBlockNormUs : 0);
  return seconds + beside_us * 1e-6;
}

}  // namespace torchweld
