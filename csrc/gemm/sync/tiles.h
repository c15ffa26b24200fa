// The tiles of the engine on mma.sync, for sm_80 and newer. This is pure host code.
#pragma once

#include <algorithm>

#include "core/refusal.h"
#include "gemm/problem.h"

namespace torchweld {

// The size class of a tile. The kernels of each size class are compiled in a file of their own.
enum class SyncSize : int8_t { kLarge, kMedium, kSmall };

struct SyncTile {
  int block_m, block_n;  // number of rows of a, b per tile; if gated, block_n counts both halves
  int warps_m, warps_n;
  int stages;  // the number of pipeline stages in shared memory
  int blocks_per_sm;
  // The tensor-core throughput of an SM that runs blocks_per_sm blocks, relative to the throughput
  // with the first tile of kSyncTiles.
  float rate;
  float rate_alone;  // the relative throughput of an SM that runs only one block
  // The time of a tile outside of its mainloop, as a multiple of the time of one k-block.
  // fixed_k_blocks is the time of the start of the tile and of its stores. pointwise_k_blocks is
  // the time of an activation or a gate. Both times are shorter if an SM runs several blocks,
  // because one block then multiplies while another block is outside of its mainloop.
  float fixed_k_blocks, pointwise_k_blocks;
  bool fp32;  // whether the tile is for kFloat32; such tiles leave registers for bf16 terms

  constexpr bool supports_dtype(GemmMath math) const {
    return fp32 == (math == GemmMath::kFloat32);
  }
  // Whether there are kernels of this tile for grouped products.
  constexpr bool supports_groups() const { return block_m == block_n; }
  constexpr SyncSize size() const {
    const int area = block_m * block_n * (fp32 ? 2 : 1);
    return area >= 32768 ? SyncSize::kLarge : area >= 16384 ? SyncSize::kMedium : SyncSize::kSmall;
  }
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int warp_m() const { return block_m / warps_m; }
  constexpr int warp_n() const { return block_n / warps_n; }
  constexpr int stage_bytes() const { return (block_m + block_n) * kKBlockBytes; }
  constexpr int shared_bytes() const { return stages * stage_bytes(); }
  // Whether the last pipeline stage can hold 16 rows of every warp's accumulators.
  constexpr bool staging_fits() const {
    return warps_m * warps_n * 16 * warp_n() * 4 <= stage_bytes();
  }
};

// Each entry lists block_m, block_n, warps_m, warps_n, stages, blocks_per_sm, rate, rate_alone,
// fixed_k_blocks, pointwise_k_blocks and fp32.
inline constexpr SyncTile kSyncTiles[] = {
    {256, 128, 4, 2, 3, 1, 1.00f, 1.00f, 3.2f, 2.4f, false},
    {128, 128, 2, 2, 3, 2, 0.94f, 0.60f, 2.3f, 1.8f, false},
    {128, 64, 2, 2, 3, 3, 0.78f, 0.45f, 2.0f, 1.5f, false},
    {64, 64, 2, 2, 3, 3, 0.63f, 0.28f, 4.5f, 5.0f, false},
    {64, 128, 2, 2, 3, 2, 1.00f, 0.75f, 2.0f, 1.0f, true},
    {64, 64, 2, 2, 3, 2, 0.86f, 0.60f, 2.0f, 1.0f, true},
};
inline constexpr int kSyncTileCount = sizeof(kSyncTiles) / sizeof(kSyncTiles[0]);

inline Refusal sync_refusal(const GemmProblem& p, const SyncTile& tile, int splits) {
  constexpr int64_t kMaxKBlocks = int64_t{1} << 24;  // the kernels count a split's K in 32 bits
  if (!tile.supports_dtype(p.math)) {
    return tile.fp32 ? "the tile is only for float32, whose bf16 terms need its registers"
                     : "the tile leaves no registers for the bf16 terms of float32";
  }
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  if (p.normed) return kNoNorm;
  if (p.grouped != Grouped::kNone) {
    if (!tile.supports_groups()) return "the tile has no kernel for a grouped product";
    if (splits > 1) return "the tiles of a grouped product are not split";
    if (p.grouped == Grouped::kRows ? !p.a_k_major : p.a_k_major || p.b_k_major) {
      return kGroupedLayout;
    }
  }
  const int64_t all = p.k_blocks(), split = (all + splits - 1) / splits;
  if ((splits - 1) * split >= all) {
    return {"K has {} k-blocks, which leaves one of {} splits empty", all, splits};
  }
  if (split > kMaxKBlocks) return "a split of K would have more than 2^24 k-blocks";
  const double blocks = (double(p.m) / tile.block_m + 1) *
                        (static_cast<double>(p.width()) / tile.block_n + 1) * splits *
                        static_cast<double>(p.batch);
  return grid_fits(blocks) ? Refusal() : "more than 2^31 - 1 tiles";
}

// Estimates the time of the kernel: the time of the tensor cores of the busiest SM, plus the time
// to write and read the split-K partials.
inline double sync_seconds(const GemmProblem& given, const SyncTile& tile, int splits) {
  const GemmProblem p = given.without_groups(tile.block_m, 1);
  constexpr double kMacsPerSecond = 0.9e12;  // the throughput of one SM, with 16-bit operands
  constexpr double kBytesPerSecond = 3e12, kLaunchSeconds = 3e-6;
  const double slower = p.math == GemmMath::kFloat32 ? 4.2 : p.math == GemmMath::kTf32 ? 1.2 : 1;
  const int64_t tiles =
      (p.m + tile.block_m - 1) / tile.block_m * ((p.width() + tile.block_n - 1) / tile.block_n);
  const int64_t k_blocks = (p.k_blocks() + splits - 1) / splits;
  const int64_t blocks = tiles * splits * p.batch;
  // Number of blocks on the busiest SM.
  const int64_t load = (blocks + p.device.sms - 1) / p.device.sms;
  const double rate = load >= tile.blocks_per_sm
                          ? tile.rate
                          : tile.rate_alone + (tile.rate - tile.rate_alone) * (load - 1) /
                                                  std::max(1, tile.blocks_per_sm - 1);
  const double fixed = tile.fixed_k_blocks + (p.pointwise ? tile.pointwise_k_blocks : 0);
  const double macs = double(tile.block_m) * tile.block_n * p.block_k() * (k_blocks + fixed);
  const double time = load * macs * slower / (rate * kMacsPerSecond);
  if (splits == 1) return time;
  return time + kLaunchSeconds + 2.0 * splits * p.batch * p.m * p.width() * 4 / kBytesPerSecond;
}

}  // namespace torchweld
