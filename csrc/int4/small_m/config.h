// The tiles of the wgmma kernel for small M (int4/small_m/kernel.cuh). x must be 16-bit, and a
// group must consist of whole chunks of 64 columns. This is pure host code that is tested without a
// GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "int4/cost.h"
#include "int4/layout.h"
#include "int4/shared_memory.h"

namespace torchweld {

// A block multiplies `rows` rows of the weight by `tokens` rows of x. A k-block has `chunks` chunks
// of 64 columns.
struct Int4SmallMTile {
  int rows, tokens;
  // Number of warps. Warpgroups that have the same 64 rows divide the chunks among themselves.
  int warps;
  int chunks;  // number of chunks per k-block
  // Number of stages of x. Two stages are multiplied while the other stages are loaded.
  int stages;
  int weight_stages;  // number of k-blocks of the weight that are kept in registers
  Int4Times times;

  // The number of blocks per SM.
  // NOTE: enough loads of x are in flight only if the ring fills the shared memory of an SM.
  static constexpr int blocks = 1;
  static constexpr bool kThreeSplits = true;
  static constexpr int64_t kMaxTokens = 4096;  // with more tokens, large-M tiles are as fast

  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / kInt4TileRows; }
  constexpr int warp_splits() const { return warps / row_tiles(); }
  // Returns the number of chunks per k-block that a warp multiplies.
  constexpr int warp_chunks() const { return chunks / warp_splits(); }
  constexpr int x_bytes() const { return chunks * tokens * kInt4ChunkK * 2; }
  // Stages are aligned to 1024 bytes, because the swizzle of x requires it.
  constexpr int stage_bytes() const {
    return (x_bytes() + row_tiles() * chunks * kInt4ScaleBytes + 1023) / 1024 * 1024;
  }
  constexpr int sum_row_floats() const { return rows + kInt4SumPadding; }
  // After the mainloop, the accumulators overwrite the ring in shared memory.
  constexpr int shared_bytes() const {
    return std::max(stages * stage_bytes(), tokens * sum_row_floats() * 4);
  }
};

inline constexpr Int4SmallMTile kInt4SmallMTiles[] = {
    {128, 32, 16, 4, 8, 2, {920, 920, 2900, 470}},
    {64, 64, 16, 4, 5, 4, {875, 875, 2400, 500}},
    {128, 64, 16, 4, 6, 2, {1080, 1080, 3000, 1070}},
    {256, 128, 16, 2, 5, 1, {1400, 1400, 3000, 2900}}};
inline constexpr int kInt4SmallMTileCount = sizeof(kInt4SmallMTiles) / sizeof(kInt4SmallMTiles[0]);

}  // namespace torchweld
