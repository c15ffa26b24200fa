// Tiles of the kernel for few tokens (int4_decode.cuh) and how it divides a product: a block, or a
// cluster of blocks that share K, owns some neighbouring tiles of 16 rows of the weight, each of
// its warps has some steps of K. For 16-bit x. Pure host code: tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "ops/int4_pack/int4_layout.h"

namespace torchweld {

struct Int4DecodeTile {
  int tokens;
  int warps;   // of a block; each SM has one block
  int chunks;  // of K in a step, all of one group
  int depth;   // steps in a warp's ring: one is being multiplied, the others on their way
  int chains;  // sums that a warp builds side by side
  int parts;   // of K, each a block of a cluster

  constexpr int threads() const { return warps * 32; }
  // A slot of a ring: words, then scales and zeros of 16 rows. They keep it on 16 bytes.
  constexpr int word_bytes() const { return chunks * kInt4ChunkWords * 4; }
  static constexpr int kScaleBytes = kInt4TileRows * 2, kZeroBytes = kInt4TileRows / 2;
  constexpr int slot_bytes() const { return word_bytes() + kScaleBytes + 2 * kZeroBytes; }
  constexpr int ring_bytes() const { return depth * slot_bytes(); }
  // A warp's sums of a tile, two tokens at a time.
  // NOTE: the padding lets a fragment be written, and rows be read, without bank conflicts.
  static constexpr int kPairFloats = 2 * kInt4TileRows + 8;
  // Tiles whose sums a cluster adds at once.
  static constexpr int kClusterTiles = 8;
};

// The first one that takes a product is chosen.
inline constexpr Int4DecodeTile kInt4DecodeTiles[] = {{8, 16, 2, 4, 2, 1},
                                                      {8, 16, 2, 4, 2, 2},
                                                      {8, 16, 1, 8, 1, 1},
                                                      {16, 16, 2, 3, 1, 1},
                                                      {16, 16, 1, 6, 1, 1}};
inline constexpr int kInt4DecodeTileCount = sizeof(kInt4DecodeTiles) / sizeof(kInt4DecodeTiles[0]);

struct Int4DecodePlan {
  int steps, groups;           // of K
  int part_steps;              // of a part, but the last one
  int owners;                  // blocks, or clusters of them
  int base_tiles, more_tiles;  // of an owner; the first more_tiles owners have one more
  int x_row_bytes;             // of a warp's columns of x in shared memory
  int x_bytes;                 // of all of x there
  int sum_floats;              // of a warp's sums of a tile
  int shared_bytes;
  FastDivisor group_steps;

  Int4DecodePlan(const Int4DecodeTile& tile, int64_t m, const Int4Shape& shape, int sms)
      : steps(static_cast<int>(shape.chunks() / tile.chunks)),
        groups(static_cast<int>(shape.groups)),
        part_steps((steps + tile.parts - 1) / tile.parts),
        owners(static_cast<int>(std::min<int64_t>(shape.tiles(), std::max(1, sms / tile.parts)))),
        base_tiles(static_cast<int>(shape.tiles() / owners)),
        more_tiles(static_cast<int>(shape.tiles() % owners)),
        sum_floats(static_cast<int>((m + 1) / 2 * Int4DecodeTile::kPairFloats)),
        group_steps(shape.group_units() / kInt4ChunkUnits / tile.chunks) {
    const int64_t warp_steps = (part_steps + tile.warps - 1) / tile.warps;
    // NOTE: 16 bytes of padding spread the rows that ldmatrix reads over all banks.
    const int64_t row_bytes = warp_steps * tile.chunks * kInt4ChunkK * 2 + 16;
    const int64_t all_x = tile.warps * m * row_bytes;
    // Sums of one tile are read while those of the next are written.
    const int64_t sums = 2 * tile.warps * sum_floats;
    const int64_t parts = tile.parts == 1 ? 0 : Int4DecodeTile::kClusterTiles * kInt4TileRows * m;
    const int64_t all = tile.warps * tile.ring_bytes() + all_x + 4 * (sums + parts);
    x_row_bytes = static_cast<int>(std::min<int64_t>(row_bytes, kTooMuch));
    x_bytes = static_cast<int>(std::min<int64_t>(all_x, kTooMuch));
    shared_bytes = static_cast<int>(std::min<int64_t>(all, kTooMuch));
  }

  static constexpr int64_t kTooMuch = 1 << 30;
};

}  // namespace torchweld
