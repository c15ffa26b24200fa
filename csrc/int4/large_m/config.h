// The tiles of the wgmma kernel for large M (int4/large_m/kernel.cuh). x must be 16-bit, and a
// group must consist of whole chunks of 64 columns. This is pure host code that is tested without a
// GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "int4/cost.h"
#include "int4/layout.h"
#include "int4/shared_memory.h"
#include "int4/small_m/config.h"

namespace torchweld {

// A block multiplies `rows` rows of the weight by `tokens` rows of x. A k-block has `chunks` chunks
// of 64 columns.
struct Int4LargeMTile {
  int rows, tokens;
  int warps;   // number of warps, a multiple of 4; warp w computes row tiles w, w + warps, ...
  int chunks;  // number of chunks per k-block
  // Number of stages of the ring. Two stages are multiplied while the other stages are loaded.
  int stages;
  int blocks;  // the number of blocks per SM
  // True if a block loops over tiles and loads the next tile during the epilogue of the current
  // tile.
  bool persistent;
  Int4Times times;

  static constexpr bool kThreeSplits = false;
  static constexpr int64_t kMaxTokens = int64_t{1} << 62;

  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / kInt4TileRows; }
  constexpr int weight_bytes() const { return row_tiles() * chunks * kInt4ChunkWords * 4; }
  constexpr int x_bytes() const { return chunks * tokens * kInt4ChunkK * 2; }
  // Stages are aligned to 1024 bytes, because the swizzle of x requires it.
  constexpr int stage_bytes() const {
    return (weight_bytes() + x_bytes() + row_tiles() * chunks * kInt4ScaleBytes + 1023) / 1024 *
           1024;
  }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int y_row_bytes() const { return rows * 2 + kInt4SumPadding * 4; }
  constexpr int sum_row_floats() const { return rows + kInt4SumPadding; }
  // Returns the number of bytes of shared memory of a block. After the mainloop, y or the partials
  // of a split overwrite the ring. In a persistent block y lies behind the ring instead.
  constexpr int shared_bytes() const {
    const int y = tokens * y_row_bytes(), sums = tokens * sum_row_floats() * 4;
    return std::max(sums, persistent ? ring_bytes() + y : std::max(ring_bytes(), y));
  }
};

inline constexpr Int4LargeMTile kInt4LargeMTiles[] = {
    {128, 128, 8, 1, 5, 2, false, {480, 417, 2800, 1500}},
    {128, 256, 8, 1, 4, 1, true, {710, 710, 4700, 2350}}};
inline constexpr int kInt4LargeMTileCount = sizeof(kInt4LargeMTiles) / sizeof(kInt4LargeMTiles[0]);

// The minimum number of tokens for the wgmma tiles (small-M and large-M). With fewer tokens the
// mma.sync kernels are as fast.
inline constexpr int64_t kInt4LargeMTokens = 17;

}  // namespace torchweld
