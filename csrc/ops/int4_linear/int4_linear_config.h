// Which tile a product with a 4-bit weight takes, and into how many parts K is cut. Pure host code:
// tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/int4_linear/int4_cost.h"
#include "ops/int4_linear/int4_decode_config.h"
#include "ops/int4_linear/int4_wide_config.h"
#include "ops/int4_pack/int4_layout.h"

namespace torchweld {

// A block multiplies `rows` of the weight with `tokens` rows of x, `chunks` of 64 columns a step.
struct Int4Tile {
  int rows, tokens;
  int warps;   // each has rows / warps rows and all tokens
  int chunks;  // of K in a step
  int stages;  // of the ring in shared memory
  int blocks;  // of 16-bit x that the registers of an SM hold
  // The scale multiplies the sum of each group, which serves every dtype and group; or the weight,
  // which needs half the accumulators, 16 bits and groups of whole chunks.
  bool scale_sums;
  Int4Times times;

  static constexpr bool kThirds = false;

  // fp32 x is split into pieces in registers.
  constexpr int blocks_per_sm(int elem_size) const {
    return elem_size == 4 ? (blocks + 1) / 2 : blocks;
  }
  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / kInt4TileRows; }
  constexpr bool suits(int elem_size, bool whole_chunks) const {
    return scale_sums || (elem_size == 2 && whole_chunks);
  }
  // Of x in shared memory. NOTE: fp32 rows have 32 bytes of padding, 16-bit ones a swizzle; both
  // let fragments be read without bank conflicts.
  static constexpr int x_row_bytes(int elem_size) {
    return kInt4ChunkK * elem_size + (elem_size == 4 ? 32 : 0);
  }
  constexpr int weight_bytes() const { return row_tiles() * chunks * kInt4ChunkWords * 4; }
  constexpr int x_bytes(int elem_size) const { return chunks * tokens * x_row_bytes(elem_size); }
  constexpr int scale_bytes(int elem_size) const { return rows * chunks * elem_size; }
  constexpr int zero_bytes() const { return rows * chunks / 2; }
  // Stages start on 128 bytes, so that a swizzle is an xor of their addresses.
  constexpr int stage_bytes(int elem_size) const {
    return (weight_bytes() + x_bytes(elem_size) + scale_bytes(elem_size) + zero_bytes() + 127) /
           128 * 128;
  }
  // The sums of a tile pass through the ring's memory. Four floats of padding a token.
  constexpr int staging_bytes() const { return tokens * (rows + 4) * 4; }
  constexpr int shared_bytes(int elem_size) const {
    return std::max(stages * stage_bytes(elem_size), staging_bytes());
  }
};

// NOTE: of an SM's instructions a small batch needs half of what it can issue while it reads its
// share of the weight; two row tiles a warp and two chunks a step keep it at that.
inline constexpr Int4Tile kInt4Tiles[] = {{64, 8, 2, 2, 4, 8, true, {700, 160, 5500, 50}},
                                          {128, 16, 4, 2, 3, 5, true, {800, 360, 7500, 100}},
                                          {128, 32, 4, 2, 3, 4, true, {750, 540, 8300, 255}},
                                          {128, 64, 4, 1, 4, 3, false, {465, 396, 7300, 560}},
                                          {128, 128, 4, 1, 4, 2, false, {640, 588, 14200, 245}},
                                          {256, 128, 8, 1, 4, 1, false, {1370, 1370, 6500, 4900}}};
inline constexpr int kInt4TileCount = sizeof(kInt4Tiles) / sizeof(kInt4Tiles[0]);
inline constexpr int kInt4FirstWide = kInt4TileCount + kInt4DecodeTileCount;
inline constexpr int kInt4FirstDeep = kInt4FirstWide + kInt4WideTileCount;

// fp32, and groups that are no whole chunks: with more tokens than this the weight is dequantised
// into memory and multiplied by the matmul engine.
inline constexpr int64_t kInt4DenseTokens = 128;

struct Int4Problem {
  int64_t m;
  Int4Shape shape;
  int elem_size;            // of x, bytes
  int sms;                  // of the device
  int shared_limit;         // bytes of shared memory that one block may have
  bool clusters;            // parts can be added up within a cluster of blocks
  bool warpgroups = false;  // the code that runs has products of warpgroups

  constexpr bool whole_chunks() const {
    return shape.groups > 0 && shape.k % (shape.groups * kInt4ChunkK) == 0;
  }
};

struct Int4Choice {
  // Index into kInt4Tiles, then, from kInt4TileCount on, into kInt4DecodeTiles, then, from
  // kInt4FirstWide on, into kInt4WideTiles, then, from kInt4FirstDeep on, into kInt4DeepTiles;
  // -1: dequantise.
  int tile;
  int parts;            // of K; their sums are added in a fixed order
  int64_t part_chunks;  // of a part
  bool cluster;         // the parts of a tile are a cluster

  constexpr bool decodes() const { return tile >= kInt4TileCount && tile < kInt4FirstWide; }
  constexpr bool is_wide() const { return tile >= kInt4FirstWide && tile < kInt4FirstDeep; }
  constexpr bool is_deep() const { return tile >= kInt4FirstDeep; }
};

// Why a tile of kInt4DecodeTiles can't take the product, nullptr where it can.
inline const char* int4_decode_refusal(const Int4Problem& p, const Int4DecodeTile& tile) {
  if (p.elem_size != 2 || !p.whole_chunks()) {
    return "the tile is for 16-bit x and groups of a multiple of 64";
  }
  if (p.m > tile.tokens) return "the tile has fewer tokens";
  if (p.shape.group_units() / kInt4ChunkUnits % tile.chunks != 0) {
    return "a slice of the tile is more than a group, or no part of one";
  }
  if (p.shape.chunks() % (tile.parts * tile.step_chunks()) != 0) {
    return "a part of K is no whole number of the tile's steps";
  }
  if (tile.parts > 1 && !p.clusters) return "the tile is for clusters of blocks";
  // NOTE: by the next power of two, as remembered choices count tokens.
  int64_t m = 1;
  while (m < p.m) m *= 2;
  const Int4DecodePlan plan(tile, m, p.shape, p.sms);
  return plan.shared_bytes <= p.shared_limit ? nullptr
                                             : "x needs more shared memory than the GPU has";
}

// The first of kInt4DecodeTiles that can take the product, -1 where none can.
inline int choose_int4_decode(const Int4Problem& p) {
  for (int i = 0; i < kInt4DecodeTileCount; ++i) {
    if (int4_decode_refusal(p, kInt4DecodeTiles[i]) == nullptr) return i;
  }
  return -1;
}

inline Int4Choice int4_decode_choice(const Int4Problem& p, int decode) {
  const int parts = kInt4DecodeTiles[decode].parts;
  return {kInt4TileCount + decode, parts, p.shape.chunks() / parts, parts > 1};
}

// Why the tiles of kInt4WideTiles and kInt4DeepTiles can't take the product, nullptr where they
// can.
inline const char* int4_wide_refusal(const Int4Problem& p) {
  if (p.elem_size != 2 || !p.whole_chunks()) {
    return "the tile is for 16-bit x and groups of a multiple of 64";
  }
  return p.warpgroups && p.clusters ? nullptr : "the tile is for Hopper's products of warpgroups";
}

// Nanoseconds. Without clusters the sums of parts are written and added by another kernel. fp32 x
// is multiplied in three pieces, in about twice the time.
inline double int4_time(const Int4Problem& p, const Int4Tile& tile, int parts, int64_t steps) {
  constexpr double kSumNs = 3000, kSumBytesPerNs = 2000;
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.shape.n);
  const double tiles = std::ceil(m / tile.tokens) * std::ceil(n / tile.rows);
  Int4Times times = tile.times;
  if (p.elem_size == 4) {
    times.step *= 2;
    times.busy *= 2;
  }
  const double time = int4_blocks_time(times, tiles, parts, steps, tile.blocks_per_sm(p.elem_size),
                                       p.sms, p.clusters);
  if (parts == 1 || p.clusters) return time;
  return time + kSumNs + 8 * parts * m * n / kSumBytesPerNs;  // 4 bytes there, 4 back
}

inline Int4Choice choose_int4(const Int4Problem& p) {
  Int4Choice best{-1, 1, p.shape.chunks(), false};
  const int decode = choose_int4_decode(p);
  if (decode >= 0) return int4_decode_choice(p, decode);
  if (p.m >= kInt4WideTokens && int4_wide_refusal(p) == nullptr) {
    const Int4WideChoice wide = choose_int4_wide(p.m, p.shape, p.sms, p.shared_limit);
    if (wide.tile >= 0) {
      return {kInt4FirstWide + wide.tile, wide.parts, wide.part_chunks, wide.parts > 1};
    }
  }
  if (!(p.elem_size == 2 && p.whole_chunks()) && p.m > kInt4DenseTokens) return best;
  double best_time = -1;
  int tokens = 0;  // of the smallest tile that holds all tokens
  for (int i = 0; i < kInt4TileCount; ++i) {
    const Int4Tile& tile = kInt4Tiles[i];
    const bool fits = tile.shared_bytes(p.elem_size) <= p.shared_limit;
    if (!tile.suits(p.elem_size, p.whole_chunks()) || !fits) continue;
    if (tokens >= p.m && tile.tokens > tokens) break;
    if (tile.tokens > tokens) best_time = -1;  // larger tiles come later
    tokens = tile.tokens;
    for (int parts = 1; parts <= 8; parts *= 2) {
      const int64_t part_steps = int4_part_steps(p.shape, tile.chunks, parts);
      if (parts > 1 && part_steps < 2) break;
      const double time = int4_time(p, tile, parts, part_steps);
      if (best_time >= 0 && time >= best_time) continue;
      best_time = time;
      best = {i, parts, part_steps * tile.chunks, parts > 1 && p.clusters};
    }
  }
  return best;
}

}  // namespace torchweld
