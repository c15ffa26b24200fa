// The tiles of the decode kernel (int4/decode/kernel.cuh) for 16-bit x, and the division of the
// work. An owner is a block, or a cluster with one block per split of K. An owner processes
// consecutive tiles of 16 weight rows. The warps of the owner divide the k-blocks of these tiles
// evenly. This is pure host code that is tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "int4/layout.h"

namespace torchweld {

struct Int4DecodeTile {
  int tokens;
  int chunks;     // number of chunks per slice; a slice lies within one group
  int slices;     // number of slices per k-block
  int splits;     // number of splits of K; one block of the cluster per split
  int multicast;  // number of blocks that load x for each other by TMA multicast

  // NOTE: the instructions for one k-block have no branch between them, so they overlap. With
  // k-blocks of 128 columns instead of 256, the kernel takes 1.15 times as long. With k-blocks of
  // 512 columns, the kernel needs more registers than there are. The same is true of k-blocks of
  // 256 columns in slices of one chunk.
  constexpr int k_block_chunks() const { return chunks * slices; }
  static constexpr int kWarps = 16, kThreads = kWarps * 32;
  // The number of stages of x. Each stage has a barrier. A warp waits only for the stages of its
  // own k-blocks.
  static constexpr int kXStages = 4;
  // The number of k-blocks that a warp prefetches to L2 before x arrives. More prefetches would
  // delay x.
  static constexpr int kPrefetched = 2;

  constexpr int cluster() const { return splits * multicast; }
  constexpr int slice_bytes() const { return chunks * kInt4ChunkWords * 4; }
  // The number of floats in shared memory for a warp's accumulators of one tile and two tokens.
  // NOTE: the padding avoids bank conflicts when fragments are written and rows are read.
  static constexpr int kPairFloats = 2 * kInt4TileRows + 8;
  // The maximum number of tiles whose accumulators an owner reduces at a time.
  static constexpr int kRoundTiles = 16;

  // Returns the number of owners (blocks or clusters). The GPU can run all owners at once.
  // NOTE: clusters of more than two blocks leave some SMs of a GPC unused: only 30 clusters of 4
  // blocks run on 132 SMs.
  int owners(int64_t tiles, int sms) const {
    const int max_owners = (cluster() <= 2 ? sms : sms * 91 / 100) / splits;
    const int count = static_cast<int>(std::min<int64_t>(tiles, std::max(1, max_owners)));
    return std::max(multicast, count / multicast * multicast);
  }
};

// The tiles in order of preference. The first legal tile is chosen.
inline constexpr Int4DecodeTile kInt4DecodeTiles[] = {
    {8, 2, 2, 1, 2},  {8, 2, 2, 4, 1},  {8, 1, 2, 1, 2},  {8, 1, 2, 4, 1},
    {16, 2, 2, 1, 2}, {16, 2, 2, 4, 1}, {16, 1, 2, 1, 2}, {16, 1, 2, 4, 1}};
inline constexpr int kInt4DecodeTileCount = sizeof(kInt4DecodeTiles) / sizeof(kInt4DecodeTiles[0]);

struct Int4DecodePlan {
  // Number of owners (see the head of this file). Each owner computes its own row tiles.
  int owners;
  int k_blocks, split_k_blocks;  // the number of k-blocks of K, and of one split of K
  int base_tiles, extra_tiles;   // tiles per owner; the first extra_tiles owners have one tile more
  int stage_k_blocks;            // number of k-blocks per stage of x; the last stage may have fewer
  int x_row_bytes;  // number of bytes of a token in shared memory: the split's x and padding
  int x_bytes;      // number of bytes of the barriers and of x in shared memory
  int sum_floats;   // number of floats for the accumulators of one warp for one tile
  int slots;        // number of slots; a slot holds one warp's accumulators of a tile
  int split_pairs;  // number of pairs of partials that a block receives from each split
  int shared_bytes;
  FastDivisor split_divisor, stage_divisor, group_slices, tokens;

  Int4DecodePlan(const Int4DecodeTile& tile, int64_t m, const Int4Shape& shape, int sms)
      : owners(tile.owners(shape.tiles(), sms)),
        k_blocks(static_cast<int>(shape.chunks() / tile.k_block_chunks())),
        split_k_blocks(std::max(1, k_blocks / tile.splits)),
        base_tiles(static_cast<int>(shape.tiles() / owners)),
        extra_tiles(static_cast<int>(shape.tiles() % owners)),
        stage_k_blocks((split_k_blocks + Int4DecodeTile::kXStages - 1) / Int4DecodeTile::kXStages),
        sum_floats(static_cast<int>((m + 1) / 2 * Int4DecodeTile::kPairFloats)),
        split_divisor(split_k_blocks),
        stage_divisor(stage_k_blocks),
        group_slices(shape.group_units() / kInt4ChunkUnits / tile.chunks),
        tokens(m) {
    const int round = std::min(base_tiles + (extra_tiles > 0), Int4DecodeTile::kRoundTiles);
    slots = Int4DecodeTile::kWarps - 1 + round;
    const int64_t pairs = round * m * (kInt4TileRows / 2);
    split_pairs = tile.splits == 1 ? 0 : static_cast<int>((pairs + tile.splits - 1) / tile.splits);
    // NOTE: 16 bytes of padding avoid bank conflicts of ldmatrix.
    const int64_t row_bytes =
        int64_t{split_k_blocks} * tile.k_block_chunks() * kInt4ChunkK * 2 + 16;
    const int64_t all_x = kBarrierBytes + m * row_bytes;
    const int64_t sums = int64_t{slots} * sum_floats * 4 + int64_t{split_pairs} * tile.splits * 8;
    x_row_bytes = static_cast<int>(std::min<int64_t>(row_bytes, kTooMuch));
    x_bytes = static_cast<int>(std::min<int64_t>(all_x, kTooMuch));
    shared_bytes = static_cast<int>(std::min<int64_t>(all_x + sums, kTooMuch));
  }

  // The number of bytes of the barriers. There is one barrier for the partials of the splits, and
  // one for each stage of x.
  static constexpr int kBarrierBytes = (1 + Int4DecodeTile::kXStages + 1) / 2 * 16;
  static constexpr int64_t kTooMuch = 1 << 30;
};

}  // namespace torchweld
