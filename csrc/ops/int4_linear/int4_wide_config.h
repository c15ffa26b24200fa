// Tiles of the kernel on Hopper's wgmma for many tokens (int4_wide_kernel.cuh). For 16-bit x and
// groups of whole chunks. Pure host code: tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/int4_linear/int4_cost.h"
#include "ops/int4_linear/int4_deep_config.h"
#include "ops/int4_linear/int4_shared_memory.h"
#include "ops/int4_pack/int4_layout.h"

namespace torchweld {

// A block multiplies `rows` of the weight with `tokens` rows of x, `chunks` of 64 columns a step.
struct Int4WideTile {
  int rows, tokens;
  int warps;   // whole warpgroups; a warp has the tiles of 16 rows w, w + warps, ...
  int chunks;  // of K in a step
  int stages;  // of the ring: two are being multiplied, the others on their way
  int blocks;  // that an SM holds
  bool stays;  // a block does one tile after the other, the next one's first steps on their way
  Int4Times times;

  static constexpr bool kThirds = false;
  static constexpr int64_t kMostTokens = int64_t{1} << 62;

  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / kInt4TileRows; }
  constexpr int weight_bytes() const { return row_tiles() * chunks * kInt4ChunkWords * 4; }
  constexpr int x_bytes() const { return chunks * tokens * kInt4ChunkK * 2; }
  // Stages start on 1024 bytes, as the swizzle of x must.
  constexpr int stage_bytes() const {
    return (weight_bytes() + x_bytes() + row_tiles() * chunks * kInt4ScaleBytes + 1023) / 1024 *
           1024;
  }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int y_row_bytes() const { return rows * 2 + kInt4SumPadding * 4; }
  constexpr int sum_row_floats() const { return rows + kInt4SumPadding; }
  // y, or the sums of a part, pass through the ring's memory; y of a block that stays does not.
  constexpr int shared_bytes() const {
    const int y = tokens * y_row_bytes(), sums = tokens * sum_row_floats() * 4;
    return std::max(sums, stays ? ring_bytes() + y : std::max(ring_bytes(), y));
  }
};

inline constexpr Int4WideTile kInt4WideTiles[] = {
    {128, 128, 8, 1, 5, 2, false, {480, 417, 2800, 1500}},
    {128, 256, 8, 1, 4, 1, true, {710, 710, 4700, 2350}}};
inline constexpr int kInt4WideTileCount = sizeof(kInt4WideTiles) / sizeof(kInt4WideTiles[0]);

// With fewer tokens the kernels on mma.sync are as fast.
inline constexpr int64_t kInt4WideTokens = 17;

}  // namespace torchweld
