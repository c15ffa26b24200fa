// Which tile a product with a 4-bit weight takes, and into how many parts K is cut. Pure host code:
// tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/family.h"
#include "int4/cost.h"
#include "int4/decode/config.h"
#include "int4/large_m/config.h"
#include "int4/layout.h"
#include "int4/shared_memory.h"

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
  // The sums of a tile pass through the ring's memory.
  constexpr int sum_row_floats() const { return rows + kInt4SumPadding; }
  constexpr int shared_bytes(int elem_size) const {
    return std::max(stages * stage_bytes(elem_size), tokens * sum_row_floats() * 4);
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

// fp32, and groups that are no whole chunks: with more tokens than this the weight is dequantised
// into memory and multiplied by the matmul engine.
inline constexpr int64_t kInt4DenseTokens = 128;

// kDecode: few tokens, x whole in shared memory. kSync: mma.sync, any dtype and group. kDeep and
// kWide: Hopper's wgmma, blocks of few and of many tokens. kDense: the weight is dequantised for
// the matmul engine.
enum class Int4Engine : int8_t { kDecode, kSync, kDeep, kWide, kDense };

struct Int4Problem {
  int64_t m;
  Int4Shape shape;
  int elem_size;  // of x, bytes
  bool bfloat16;
  DeviceFacts device;

  constexpr bool whole_chunks() const {
    return shape.groups > 0 && shape.k % (shape.groups * kInt4ChunkK) == 0;
  }
};

struct Int4Choice {
  Int4Engine engine;
  int tile;             // index into the engine's tiles, 0 for kDense
  int parts;            // of K; their sums are added in a fixed order
  int64_t part_chunks;  // of a part
  bool cluster;         // the parts of a tile are a cluster
};

inline constexpr const char* kInt4WholeChunksOnly =
    "the tile is for 16-bit x and groups of a multiple of 64";

template <typename Tile>
Refusal int4_parts_refusal(const Int4Problem& p, const Tile& tile, int parts) {
  if (!int4_has_parts<Tile>(parts)) {
    return Tile::kThirds ? "K can be cut into 1, 2, 3, 4 or 8 parts"
                         : "K can be cut into 1, 2, 4 or 8 parts";
  }
  if (int4_part_steps(p.shape, tile.chunks, parts) == 0) {
    return {"K has {} steps, which leaves one of {} parts empty",
            int4_part_steps(p.shape, tile.chunks, 1), parts};
  }
  const double blocks = (double(p.shape.n) / tile.rows + 1) * (double(p.m) / tile.tokens + 1) *
                        static_cast<double>(parts);
  return grid_fits(blocks) ? Refusal() : "more than 2^31 - 1 tiles";
}

inline Refusal int4_decode_refusal(const Int4Problem& p, const Int4DecodeTile& tile) {
  if (p.elem_size != 2 || !p.whole_chunks()) return kInt4WholeChunksOnly;
  if (p.m > tile.tokens) return "the tile has fewer tokens";
  if (p.shape.group_units() / kInt4ChunkUnits % tile.chunks != 0) {
    return "a slice of the tile is more than a group, or no part of one";
  }
  if (p.shape.chunks() % (tile.parts * tile.step_chunks()) != 0) {
    return "a part of K is no whole number of the tile's steps";
  }
  if (tile.parts > 1 && !p.device.clusters) return "the tile is for clusters of blocks";
  // NOTE: by the next power of two, as remembered choices count tokens.
  const Int4DecodePlan plan(tile, size_class(p.m), p.shape, p.device.sms);
  return plan.shared_bytes <= p.device.shared_limit ? Refusal()
                                                    : "x needs more shared memory than the GPU has";
}

inline Refusal int4_sync_refusal(const Int4Problem& p, const Int4Tile& tile, int parts) {
  if (!tile.suits(p.elem_size, p.whole_chunks())) return kInt4WholeChunksOnly;
  if (tile.shared_bytes(p.elem_size) > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(p.elem_size), p.device.shared_limit);
  }
  return int4_parts_refusal(p, tile, parts);
}

// Of the engines on wgmma.
template <typename Tile>
Refusal int4_wgmma_refusal(const Int4Problem& p, const Tile& tile, int parts) {
  if (p.elem_size != 2 || !p.whole_chunks()) return kInt4WholeChunksOnly;
  if (!p.device.wgmma || !p.device.clusters) return "the tile is for Hopper's wgmma";
  if (p.m > Tile::kMaxTokens) return "the tile is for fewer rows of x";
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  return int4_parts_refusal(p, tile, parts);
}

inline Refusal int4_refusal(const Int4Problem& p, Int4Engine engine, int tile, int parts) {
  switch (engine) {
    case Int4Engine::kDecode:
      if (parts != kInt4DecodeTiles[tile].parts) return "the tile has another number of parts";
      return int4_decode_refusal(p, kInt4DecodeTiles[tile]);
    case Int4Engine::kSync:
      return int4_sync_refusal(p, kInt4Tiles[tile], parts);
    case Int4Engine::kDeep:
      return int4_wgmma_refusal(p, kInt4SmallMTiles[tile], parts);
    case Int4Engine::kWide:
      return int4_wgmma_refusal(p, kInt4LargeMTiles[tile], parts);
    case Int4Engine::kDense:
      return parts == 1 ? Refusal() : "a weight that is dequantised is not cut";
  }
  return {};
}

inline Int4Choice int4_choice(const Int4Problem& p, Int4Engine engine, int tile, int parts) {
  const auto cut = [&](int chunks, bool cluster) {
    const int64_t part_chunks = int4_part_steps(p.shape, chunks, parts) * chunks;
    return Int4Choice{engine, tile, parts, part_chunks, parts > 1 && cluster};
  };
  switch (engine) {
    case Int4Engine::kDecode:
      return {engine, tile, parts, p.shape.chunks() / parts, parts > 1};
    case Int4Engine::kSync:
      return cut(kInt4Tiles[tile].chunks, p.device.clusters);
    case Int4Engine::kDeep:
      return cut(kInt4SmallMTiles[tile].chunks, true);
    case Int4Engine::kWide:
      return cut(kInt4LargeMTiles[tile].chunks, true);
    case Int4Engine::kDense:
      break;
  }
  return {Int4Engine::kDense, 0, 1, p.shape.chunks(), false};
}

// Nanoseconds. Without clusters the sums of parts are written and added by another kernel. fp32 x
// is multiplied in three pieces, in about twice the time.
inline double int4_sync_time(const Int4Problem& p, const Int4Tile& tile, int parts) {
  constexpr double kSumNs = 3000, kSumBytesPerNs = 2000;
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.shape.n);
  const double tiles = std::ceil(m / tile.tokens) * std::ceil(n / tile.rows);
  Int4Times times = tile.times;
  if (p.elem_size == 4) {
    times.step *= 2;
    times.busy *= 2;
  }
  const int64_t steps = int4_part_steps(p.shape, tile.chunks, parts);
  const double time = int4_blocks_time(times, tiles, parts, steps, tile.blocks_per_sm(p.elem_size),
                                       p.device.sms, p.device.clusters);
  if (parts == 1 || p.device.clusters) return time;
  return time + kSumNs + 8 * parts * m * n / kSumBytesPerNs;  // 4 bytes there, 4 back
}

// Nanoseconds of a tile on wgmma.
template <typename Tile>
double int4_wgmma_time(const Int4Problem& p, const Tile& tile, int parts) {
  const double tiles = static_cast<double>((p.shape.n + tile.rows - 1) / tile.rows) *
                       static_cast<double>((p.m + tile.tokens - 1) / tile.tokens);
  return int4_blocks_time(tile.times, tiles, parts, int4_part_steps(p.shape, tile.chunks, parts),
                          tile.blocks, p.device.sms, true);
}

// The fastest of the tiles on wgmma; kDense where there is none.
inline Int4Choice choose_int4_wgmma(const Int4Problem& p) {
  Int4Choice best = int4_choice(p, Int4Engine::kDense, 0, 1);
  double best_time = -1;
  const auto consider = [&](Int4Engine engine, int index, const auto& tile) {
    const int64_t tiles =
        (p.shape.n + tile.rows - 1) / tile.rows * ((p.m + tile.tokens - 1) / tile.tokens);
    for (const int parts : kInt4Parts) {
      // K is cut where tiles alone leave SMs without a block.
      if (parts > 1 && tiles >= p.device.sms) continue;
      if (int4_wgmma_refusal(p, tile, parts)) continue;
      const double time = int4_wgmma_time(p, tile, parts);
      if (best_time >= 0 && time >= best_time) continue;
      best_time = time;
      best = int4_choice(p, engine, index, parts);
    }
  };
  for (int i = 0; i < kInt4LargeMTileCount; ++i)
    consider(Int4Engine::kWide, i, kInt4LargeMTiles[i]);
  for (int i = 0; i < kInt4SmallMTileCount; ++i) {
    const Int4SmallMTile& tile = kInt4SmallMTiles[i];
    // Several tiles of as many tokens as the wide ones have were not timed.
    if (tile.tokens >= kInt4LargeMTiles[0].tokens && p.m > tile.tokens) continue;
    consider(Int4Engine::kDeep, i, tile);
  }
  return best;
}

// The fastest of the smallest tiles that hold all tokens; kDense where there is none.
inline Int4Choice choose_int4_sync(const Int4Problem& p) {
  Int4Choice best = int4_choice(p, Int4Engine::kDense, 0, 1);
  double best_time = -1;
  int tokens = 0;  // of the smallest tile that holds all tokens
  for (int i = 0; i < kInt4TileCount; ++i) {
    const Int4Tile& tile = kInt4Tiles[i];
    if (int4_sync_refusal(p, tile, 1)) continue;
    if (tokens >= p.m && tile.tokens > tokens) break;
    if (tile.tokens > tokens) best_time = -1;  // larger tiles come later
    tokens = tile.tokens;
    for (int parts = 1; parts <= 8; parts *= 2) {
      if (parts > 1 && int4_part_steps(p.shape, tile.chunks, parts) < 2) break;
      const double time = int4_sync_time(p, tile, parts);
      if (best_time >= 0 && time >= best_time) continue;
      best_time = time;
      best = int4_choice(p, Int4Engine::kSync, i, parts);
    }
  }
  return best;
}

// Engines in the order of their speed where they serve, as measured; within one by its times.
inline Int4Choice choose_int4(const Int4Problem& p) {
  for (int i = 0; i < kInt4DecodeTileCount; ++i) {
    if (!int4_decode_refusal(p, kInt4DecodeTiles[i])) {
      return int4_choice(p, Int4Engine::kDecode, i, kInt4DecodeTiles[i].parts);
    }
  }
  if (p.m >= kInt4LargeMTokens) {
    const Int4Choice best = choose_int4_wgmma(p);
    if (best.engine != Int4Engine::kDense) return best;
  }
  const bool slow = p.elem_size == 4 || !p.whole_chunks();
  if (slow && p.m > kInt4DenseTokens) return int4_choice(p, Int4Engine::kDense, 0, 1);
  return choose_int4_sync(p);
}

}  // namespace torchweld
