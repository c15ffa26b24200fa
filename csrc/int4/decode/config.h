// Tiles of the kernel for few tokens (int4/decode/kernel.cuh) and how it divides a product: a
// block, or a cluster of blocks that have parts of K, owns some neighbouring tiles of 16 rows of
// the weight; its warps divide their steps of K evenly. For 16-bit x. Pure host code: tested
// without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "int4/layout.h"

namespace torchweld {

struct Int4DecodeTile {
  int tokens;
  int chunks;  // of K in a slice, all of one group
  int slices;  // of a step
  int parts;   // of K, each a block of a cluster
  int share;   // blocks of a cluster that share what they load of x, where there are clusters

  // NOTE: a step of 256 columns without a branch lets a warp's instructions overlap: half of it
  // takes 1.15 times as long. Twice as much needs more registers than there are, as does so much in
  // slices of a chunk.
  constexpr int step_chunks() const { return chunks * slices; }
  static constexpr int kWarps = 16, kThreads = kWarps * 32;
  // Pieces of x, each with a barrier: a warp waits for those of its own steps.
  static constexpr int kPieces = 4;
  // Steps that a warp has brought to L2 before x is there: more than these delay x.
  static constexpr int kAhead = 2;

  constexpr int cluster() const { return parts * share; }
  constexpr int slice_bytes() const { return chunks * kInt4ChunkWords * 4; }
  // A warp's sums of a tile, two tokens at a time.
  // NOTE: the padding lets a fragment be written, and rows be read, without bank conflicts.
  static constexpr int kPairFloats = 2 * kInt4TileRows + 8;
  // Tiles whose sums are added at once.
  static constexpr int kRoundTiles = 16;

  // As many as run at once.
  // NOTE: larger clusters find no room on SMs whose neighbours have none: 30 of 4 on 132 SMs.
  int owners(int64_t tiles, int sms) const {
    const int most = (cluster() <= 2 ? sms : sms * 91 / 100) / parts;
    const int all = static_cast<int>(std::min<int64_t>(tiles, std::max(1, most)));
    return std::max(share, all / share * share);
  }
};

// The first one that takes a product is chosen.
inline constexpr Int4DecodeTile kInt4DecodeTiles[] = {
    {8, 2, 2, 1, 2},  {8, 2, 2, 4, 1},  {8, 1, 2, 1, 2},  {8, 1, 2, 4, 1},
    {16, 2, 2, 1, 2}, {16, 2, 2, 4, 1}, {16, 1, 2, 1, 2}, {16, 1, 2, 4, 1}};
inline constexpr int kInt4DecodeTileCount = sizeof(kInt4DecodeTiles) / sizeof(kInt4DecodeTiles[0]);

struct Int4DecodePlan {
  int owners;                  // blocks, or clusters of them that have parts of K
  int steps, part_steps;       // of K, and of a part of it
  int base_tiles, more_tiles;  // of an owner; the first more_tiles owners have one more
  int piece_steps;             // of a piece of x, but the last one
  int x_row_bytes;             // of a part's columns of x in shared memory
  int x_bytes;                 // of barriers and all of x there
  int sum_floats;              // of a warp's sums of a tile
  int slots;                   // for such sums
  int part_pairs;              // of sums that a block of a cluster has from each
  int shared_bytes;
  FastDivisor part_divisor, piece_divisor, group_slices, tokens;

  Int4DecodePlan(const Int4DecodeTile& tile, int64_t m, const Int4Shape& shape, int sms)
      : owners(tile.owners(shape.tiles(), sms)),
        steps(static_cast<int>(shape.chunks() / tile.step_chunks())),
        part_steps(std::max(1, steps / tile.parts)),
        base_tiles(static_cast<int>(shape.tiles() / owners)),
        more_tiles(static_cast<int>(shape.tiles() % owners)),
        piece_steps((part_steps + Int4DecodeTile::kPieces - 1) / Int4DecodeTile::kPieces),
        sum_floats(static_cast<int>((m + 1) / 2 * Int4DecodeTile::kPairFloats)),
        part_divisor(part_steps),
        piece_divisor(piece_steps),
        group_slices(shape.group_units() / kInt4ChunkUnits / tile.chunks),
        tokens(m) {
    const int round = std::min(base_tiles + (more_tiles > 0), Int4DecodeTile::kRoundTiles);
    slots = Int4DecodeTile::kWarps - 1 + round;
    const int64_t pairs = round * m * (kInt4TileRows / 2);
    part_pairs = tile.parts == 1 ? 0 : static_cast<int>((pairs + tile.parts - 1) / tile.parts);
    // NOTE: 16 bytes of padding spread the rows that ldmatrix reads over all banks.
    const int64_t row_bytes = int64_t{part_steps} * tile.step_chunks() * kInt4ChunkK * 2 + 16;
    const int64_t all_x = kBarrierBytes + m * row_bytes;
    const int64_t sums = int64_t{slots} * sum_floats * 4 + int64_t{part_pairs} * tile.parts * 8;
    x_row_bytes = static_cast<int>(std::min<int64_t>(row_bytes, kTooMuch));
    x_bytes = static_cast<int>(std::min<int64_t>(all_x, kTooMuch));
    shared_bytes = static_cast<int>(std::min<int64_t>(all_x + sums, kTooMuch));
  }

  // One of the sums of parts, one of each piece of x.
  static constexpr int kBarrierBytes = (1 + Int4DecodeTile::kPieces + 1) / 2 * 16;
  static constexpr int64_t kTooMuch = 1 << 30;
};

}  // namespace torchweld
