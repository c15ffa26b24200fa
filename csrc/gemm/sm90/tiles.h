// The tiles of the engine on wgmma and TMA, for Hopper. Pure host code.
#pragma once

#include <algorithm>

#include "core/family.h"
#include "gemm/problem.h"

namespace torchweld {

// A block has a producer warp and two consumer warpgroups. In ping-pong each warpgroup has a tile
// of its own, and finishes it while the other one multiplies; else they share one (cooperative).
struct Sm90Tile {
  int block_m, block_n;  // of the product; of a gated one block_n counts both halves
  int stages;            // of the pipeline in shared memory
  int cluster;           // blocks, one below the other, that share what they load of b
  bool pingpong;
  int boxes;  // of results that a warp has on their way to memory
  // Measured on an H200, microseconds: a step of the mainloop, what a tile costs beside its steps,
  // and what an activation adds to that. In ping-pong the other tile's mainloop hides the rest.
  float step_us, tile_us, pointwise_us;

  static constexpr int kWarpgroups = 2, kThreads = 128 * (1 + kWarpgroups);

  // Products of 64 rows that a warpgroup has of a tile.
  constexpr int row_pieces() const { return block_m / 64 / (pingpong ? 1 : kWarpgroups); }
  // Columns of a box: lines of 128 bytes, or of 64 where block_n has no whole ones.
  constexpr int box_columns(int elem_size) const {
    return block_n * elem_size % 128 == 0 ? 128 / elem_size : 64 / elem_size;
  }
  constexpr int stage_bytes() const { return (block_m + block_n) * kGemmStepBytes; }
  constexpr int box_bytes(int elem_size) const { return 16 * box_columns(elem_size) * elem_size; }
  // Stages, boxes of eight warps, the bias of two tiles and barriers; whole kilobytes.
  constexpr int shared_bytes(int elem_size) const {
    const int bytes = stages * (stage_bytes() + 16) + 8 * boxes * box_bytes(elem_size) +
                      kWarpgroups * block_n * 4;
    return (bytes + 1023) / 1024 * 1024;
  }
  // Why it has no kernel for a kind of product; null where it has.
  constexpr const char* lacks(int elem_size, bool a_k_major, bool b_k_major, bool gated) const {
    if (elem_size == 4 && !(a_k_major && b_k_major)) return "wgmma reads TF32 along K alone";
    if (!b_k_major && block_n % 64 != 0) return "the tile has no whole boxes of adjacent columns";
    if (gated && block_n % 128 != 0) return "the tile has no whole boxes in half of its columns";
    if (gated && !a_k_major) return "a gated product reads its first operand along K alone";
    return nullptr;
  }
};

inline constexpr Sm90Tile kSm90Tiles[] = {
    {128, 128, 6, 2, true, 2, 0.345f, 0.0f, 0.0f},
    {128, 128, 6, 1, true, 2, 0.365f, 0.0f, 0.0f},
    {128, 256, 4, 1, false, 2, 0.664f, 1.2f, 2.0f},
    {128, 96, 7, 1, false, 2, 0.310f, 1.0f, 1.0f},
};
inline constexpr int kSm90TileCount = sizeof(kSm90Tiles) / sizeof(kSm90Tiles[0]);

inline Refusal sm90_refusal(const GemmProblem& p, const Sm90Tile& tile, int splits) {
  constexpr int64_t kMostSize = (int64_t{1} << 31) - 512;  // coordinates are counted in 32 bits
  if (!p.device.wgmma || !p.device.tma) return "the GPU, or the code built for it, has no wgmma";
  if (p.math == GemmMath::kFloat32) return "float32 at its own accuracy is for mma.sync";
  const int elem_size = gemm_elem_size(p.math);
  if (const char* reason = tile.lacks(elem_size, p.a_k_major, p.b_k_major, p.gated)) return reason;
  if (tile.shared_bytes(elem_size) > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(elem_size), p.device.shared_limit);
  }
  if (p.k == 0) return "there is nothing to multiply";
  if (p.m > kMostSize || p.n > kMostSize || p.k > kMostSize || p.batch > kMostSize) {
    return {"no tensor map has more than {} elements in a dimension", kMostSize};
  }
  const int64_t all = p.steps(), part = (all + splits - 1) / splits;
  if ((splits - 1) * part >= all) {
    return {"K has {} steps, which leaves one of {} parts empty", all, splits};
  }
  const double tiles = (double(p.m) / tile.block_m + 2) *
                       (static_cast<double>(p.width()) / tile.block_n + 1) * splits *
                       static_cast<double>(p.batch);
  return grid_fits(tiles) ? Refusal() : "more than 2^31 - 1 tiles";
}

// The rounds of the busiest SM. The launch and the first loads are the same for every engine.
inline double sm90_seconds(const GemmProblem& p, const Sm90Tile& tile, int splits) {
  constexpr double kBytesPerSecond = 3e12, kLaunchSeconds = 3e-6;
  const auto divide_up = [](int64_t n, int64_t d) { return (n + d - 1) / d; };
  const int64_t tiles = divide_up(p.m, int64_t{tile.block_m} * tile.cluster) *
                        divide_up(p.width(), tile.block_n) * splits * p.batch;
  const int64_t rounds = divide_up(tiles, std::max(1, p.device.sms / tile.cluster));
  const double steps = static_cast<double>(divide_up(p.steps(), splits));
  const double slower = p.math == GemmMath::kTf32 ? 2 : 1;
  const double a_tile =
      steps * tile.step_us * slower + tile.tile_us + (p.pointwise ? tile.pointwise_us : 0);
  const double time = static_cast<double>(rounds) * a_tile * 1e-6;
  if (splits == 1) return time;
  return time + kLaunchSeconds +
         2.0 * splits * static_cast<double>(p.batch * p.m * p.width()) * 4 / kBytesPerSecond;
}

}  // namespace torchweld
