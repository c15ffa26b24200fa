// Chooses the engine, the tile and the number of splits of K for a matmul with a 4-bit weight. This
// is pure host code that is tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/refusal.h"
#include "int4/cost.h"
#include "int4/decode/config.h"
#include "int4/large_m/config.h"
#include "int4/layout.h"
#include "int4/shared_memory.h"

namespace torchweld {

// A block multiplies `rows` rows of the weight by `tokens` rows of x. A k-block has `chunks` chunks
// of 64 columns.
struct Int4Tile {
  int rows, tokens;
  int warps;   // number of warps; each computes rows / warps rows for all tokens
  int chunks;  // number of chunks per k-block
  int stages;  // number of stages of the ring in shared memory
  int blocks;  // number of blocks per SM if x is 16-bit; the registers per thread limit this number
  // If true, the scale of a group multiplies the accumulators of the group. This supports any dtype
  // and any group size. If false, the scale multiplies the codes. This needs only half as many
  // accumulators, but requires 16-bit x and groups of whole chunks.
  bool scale_sums;
  Int4Times times;

  static constexpr bool kThreeSplits = false;

  // The number of blocks per SM. It is lower for fp32 x, because the three bf16 terms of x need
  // more registers.
  constexpr int blocks_per_sm(int elem_size) const {
    return elem_size == 4 ? (blocks + 1) / 2 : blocks;
  }
  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / kInt4TileRows; }
  constexpr bool supports(int elem_size, bool whole_chunks) const {
    return scale_sums || (elem_size == 2 && whole_chunks);
  }
  // The number of bytes of a row of x in shared memory. A row holds the columns of one token in one
  // chunk.
  // NOTE: fp32 rows have 32 bytes of padding and 16-bit rows have a swizzle, to avoid bank
  // conflicts.
  static constexpr int x_row_bytes(int elem_size) {
    return kInt4ChunkK * elem_size + (elem_size == 4 ? 32 : 0);
  }
  constexpr int weight_bytes() const { return row_tiles() * chunks * kInt4ChunkWords * 4; }
  constexpr int x_bytes(int elem_size) const { return chunks * tokens * x_row_bytes(elem_size); }
  constexpr int scale_bytes(int elem_size) const { return rows * chunks * elem_size; }
  constexpr int zero_bytes() const { return rows * chunks / 2; }
  // Stages are aligned to 128 bytes, so that the swizzle can be an xor of the address.
  constexpr int stage_bytes(int elem_size) const {
    return (weight_bytes() + x_bytes(elem_size) + scale_bytes(elem_size) + zero_bytes() + 127) /
           128 * 128;
  }
  // After the mainloop, the accumulators overwrite the ring in shared memory. sum_row_floats() is
  // the number of floats per token.
  constexpr int sum_row_floats() const { return rows + kInt4SumPadding; }
  constexpr int shared_bytes(int elem_size) const {
    return std::max(stages * stage_bytes(elem_size), tokens * sum_row_floats() * 4);
  }
};

// NOTE: the tiles for up to 32 tokens have two row tiles per warp and two chunks per k-block. An SM
// then needs half as much time to issue the instructions as to read its slice of the weight.
inline constexpr Int4Tile kInt4Tiles[] = {{64, 8, 2, 2, 4, 8, true, {700, 160, 5500, 50}},
                                          {128, 16, 4, 2, 3, 5, true, {800, 360, 7500, 100}},
                                          {128, 32, 4, 2, 3, 4, true, {750, 540, 8300, 255}},
                                          {128, 64, 4, 1, 4, 3, false, {465, 396, 7300, 560}},
                                          {128, 128, 4, 1, 4, 2, false, {640, 588, 14200, 245}},
                                          {256, 128, 8, 1, 4, 1, false, {1370, 1370, 6500, 4900}}};
inline constexpr int kInt4TileCount = sizeof(kInt4Tiles) / sizeof(kInt4Tiles[0]);

// The maximum number of tokens for kSync if x is fp32 or if groups are not whole chunks. With more
// tokens, the weight is dequantised, and the matmul engine multiplies it (kDense).
inline constexpr int64_t kInt4DenseTokens = 128;

// kDecode is for few tokens and keeps all of x in shared memory. kSync uses mma.sync and supports
// any dtype and any group size. kSmallM and kLargeM use wgmma. kSmallM has tiles for few tokens,
// kLargeM for many tokens. kDense dequantises the weight and calls the matmul engine.
enum class Int4Engine : int8_t { kDecode, kSync, kSmallM, kLargeM, kDense };

struct Int4Problem {
  int64_t m;
  Int4Shape shape;
  int elem_size;  // bytes per element of x
  bool bfloat16;
  DeviceFacts device;
  bool invariant = false;  // whether the bits of a row of y must not depend on the other rows

  constexpr bool whole_chunks() const {
    return shape.groups > 0 && shape.k % (shape.groups * kInt4ChunkK) == 0;
  }
};

struct Int4Choice {
  Int4Engine engine;
  int tile;              // index into the engine's table of tiles, 0 for kDense
  int splits;            // number of splits of K
  int64_t split_chunks;  // number of chunks of K per split
  bool cluster;          // true if the splits of a tile form a cluster
};

inline constexpr const char* kInt4WholeChunksOnly =
    "the tile is for 16-bit x and groups of a multiple of 64";

inline constexpr const char* kInt4OtherSums =
    "the batch-invariant mode adds up K in the order of the matmul engine";

template <typename Tile>
Refusal int4_splits_refusal(const Int4Problem& p, const Tile& tile, int splits) {
  if (!int4_allows_splits<Tile>(splits)) {
    return Tile::kThreeSplits ? "K can be split 1, 2, 3, 4 or 8 ways"
                              : "K can be split 1, 2, 4 or 8 ways";
  }
  if (int4_split_k_blocks(p.shape, tile.chunks, splits) == 0) {
    return {"K has {} k-blocks, which leaves one of {} splits empty",
            int4_split_k_blocks(p.shape, tile.chunks, 1), splits};
  }
  const double blocks = (double(p.shape.n) / tile.rows + 1) * (double(p.m) / tile.tokens + 1) *
                        static_cast<double>(splits);
  return grid_fits(blocks) ? Refusal() : "more than 2^31 - 1 tiles";
}

inline Refusal int4_decode_refusal(const Int4Problem& p, const Int4DecodeTile& tile) {
  if (p.elem_size != 2 || !p.whole_chunks()) return kInt4WholeChunksOnly;
  if (p.m > tile.tokens) return "the tile has fewer tokens";
  if (p.shape.group_units() / kInt4ChunkUnits % tile.chunks != 0) {
    return "a slice of the tile does not divide a group";
  }
  if (p.shape.chunks() % (tile.splits * tile.k_block_chunks()) != 0) {
    return "a split of K is not a multiple of the tile's k-block";
  }
  if (tile.splits > 1 && !p.device.clusters) return "the tile is for clusters of blocks";
  // NOTE: m is rounded up to a power of two, so that the answer is the same for all problems of a
  // shape class. A remembered choice covers a shape class.
  const Int4DecodePlan plan(tile, size_class(p.m), p.shape, p.device.sms);
  return plan.shared_bytes <= p.device.shared_limit ? Refusal()
                                                    : "x needs more shared memory than the GPU has";
}

inline Refusal int4_sync_refusal(const Int4Problem& p, const Int4Tile& tile, int splits) {
  if (!tile.supports(p.elem_size, p.whole_chunks())) return kInt4WholeChunksOnly;
  if (tile.shared_bytes(p.elem_size) > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(p.elem_size), p.device.shared_limit);
  }
  return int4_splits_refusal(p, tile, splits);
}

// Returns the reason why a wgmma engine does not support the problem, or an empty Refusal if it
// supports the problem.
template <typename Tile>
Refusal int4_wgmma_refusal(const Int4Problem& p, const Tile& tile, int splits) {
  if (p.elem_size != 2 || !p.whole_chunks()) return kInt4WholeChunksOnly;
  if (!p.device.wgmma || !p.device.clusters) return "the tile is for Hopper's wgmma";
  if (p.m > Tile::kMaxTokens) return "the tile is for fewer rows of x";
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  return int4_splits_refusal(p, tile, splits);
}

// Whether a tile rounds each weight to the dtype of x and adds up K in one chain, as kDense does.
constexpr bool int4_is_one_chain(Int4Engine engine, int tile, int splits) {
  if (engine == Int4Engine::kDecode || splits > 1) return false;
  if (engine == Int4Engine::kSync) return !kInt4Tiles[tile].scale_sums;
  return engine != Int4Engine::kSmallM || kInt4SmallMTiles[tile].warp_splits() == 1;
}

inline Refusal int4_refusal(const Int4Problem& p, Int4Engine engine, int tile, int splits) {
  if (p.invariant && !int4_is_one_chain(engine, tile, splits)) return kInt4OtherSums;
  switch (engine) {
    case Int4Engine::kDecode:
      if (splits != kInt4DecodeTiles[tile].splits) return "the tile has another number of splits";
      return int4_decode_refusal(p, kInt4DecodeTiles[tile]);
    case Int4Engine::kSync:
      return int4_sync_refusal(p, kInt4Tiles[tile], splits);
    case Int4Engine::kSmallM:
      return int4_wgmma_refusal(p, kInt4SmallMTiles[tile], splits);
    case Int4Engine::kLargeM:
      return int4_wgmma_refusal(p, kInt4LargeMTiles[tile], splits);
    case Int4Engine::kDense:
      return splits == 1 ? Refusal() : "a product with a dequantised weight is not split";
  }
  return {};
}

inline Int4Choice int4_choice(const Int4Problem& p, Int4Engine engine, int tile, int splits) {
  const auto split_choice = [&](int chunks, bool cluster) {
    const int64_t split_chunks = int4_split_k_blocks(p.shape, chunks, splits) * chunks;
    return Int4Choice{engine, tile, splits, split_chunks, splits > 1 && cluster};
  };
  switch (engine) {
    case Int4Engine::kDecode:
      return {engine, tile, splits, p.shape.chunks() / splits, splits > 1};
    case Int4Engine::kSync:
      return split_choice(kInt4Tiles[tile].chunks, p.device.clusters);
    case Int4Engine::kSmallM:
      return split_choice(kInt4SmallMTiles[tile].chunks, true);
    case Int4Engine::kLargeM:
      return split_choice(kInt4LargeMTiles[tile].chunks, true);
    case Int4Engine::kDense:
      break;
  }
  return {Int4Engine::kDense, 0, 1, p.shape.chunks(), false};
}

// Predicts the time of the whole product with a kSync tile, in nanoseconds. If K is split and the
// GPU has no clusters, the time includes a second kernel that adds the partials of the splits. fp32
// x needs about twice the time of 16-bit x, because it is multiplied as three bf16 terms.
inline double int4_sync_time(const Int4Problem& p, const Int4Tile& tile, int splits) {
  constexpr double kSumNs = 3000, kSumBytesPerNs = 2000;
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.shape.n);
  const double tiles = std::ceil(m / tile.tokens) * std::ceil(n / tile.rows);
  Int4Times times = tile.times;
  if (p.elem_size == 4) {
    times.k_block *= 2;
    times.busy *= 2;
  }
  const int64_t k_blocks = int4_split_k_blocks(p.shape, tile.chunks, splits);
  const double time =
      int4_blocks_time(times, tiles, splits, k_blocks, tile.blocks_per_sm(p.elem_size),
                       p.device.sms, p.device.clusters);
  if (splits == 1 || p.device.clusters) return time;
  // Each partial is stored and loaded, with 4 bytes each time.
  return time + kSumNs + 8 * splits * m * n / kSumBytesPerNs;
}

// Predicts the time of the whole product with a wgmma tile, in nanoseconds.
template <typename Tile>
double int4_wgmma_time(const Int4Problem& p, const Tile& tile, int splits) {
  const double tiles = static_cast<double>((p.shape.n + tile.rows - 1) / tile.rows) *
                       static_cast<double>((p.m + tile.tokens - 1) / tile.tokens);
  return int4_blocks_time(tile.times, tiles, splits,
                          int4_split_k_blocks(p.shape, tile.chunks, splits), tile.blocks,
                          p.device.sms, true);
}

// Predicts the time of kDense on Hopper, in nanoseconds: of the weight's way through memory, and of
// the product.
inline double int4_dense_time(const Int4Problem& p) {
  constexpr double kWeightsPerNs = 570, kFlopsPerNs = 1e6;
  const double weights = static_cast<double>(p.shape.n) * static_cast<double>(p.shape.k);
  return weights / kWeightsPerNs + 2 * static_cast<double>(p.m) * weights / kFlopsPerNs;
}

// Returns the fastest legal wgmma tile, or kDense if there is none. In the batch-invariant mode,
// kDense may be faster than the tiles that add up K in one chain.
inline Int4Choice choose_int4_wgmma(const Int4Problem& p) {
  Int4Choice best = int4_choice(p, Int4Engine::kDense, 0, 1);
  double best_time = p.invariant ? int4_dense_time(p) : -1;
  const auto consider = [&](Int4Engine engine, int index, const auto& tile) {
    const int64_t tiles =
        (p.shape.n + tile.rows - 1) / tile.rows * ((p.m + tile.tokens - 1) / tile.tokens);
    for (const int splits : kInt4Splits) {
      // Split K only if there are fewer tiles than SMs.
      if (splits > 1 && tiles >= p.device.sms) continue;
      if (int4_refusal(p, engine, index, splits)) continue;
      const double time = int4_wgmma_time(p, tile, splits);
      if (best_time >= 0 && time >= best_time) continue;
      best_time = time;
      best = int4_choice(p, engine, index, splits);
    }
  };
  for (int i = 0; i < kInt4LargeMTileCount; ++i)
    consider(Int4Engine::kLargeM, i, kInt4LargeMTiles[i]);
  for (int i = 0; i < kInt4SmallMTileCount; ++i)
    consider(Int4Engine::kSmallM, i, kInt4SmallMTiles[i]);
  return best;
}

// Considers only the legal tiles of one token count: the smallest count that holds all tokens of x,
// or the largest count if none does. Returns the fastest configuration of these tiles by the time
// model. Returns kDense if no tile is legal.
inline Int4Choice choose_int4_sync(const Int4Problem& p) {
  Int4Choice best = int4_choice(p, Int4Engine::kDense, 0, 1);
  double best_time = -1;
  int tokens = 0;  // number of tokens of the last legal tile
  for (int i = 0; i < kInt4TileCount; ++i) {
    const Int4Tile& tile = kInt4Tiles[i];
    if (int4_sync_refusal(p, tile, 1)) continue;
    if (tokens >= p.m && tile.tokens > tokens) break;
    if (tile.tokens > tokens) best_time = -1;  // all earlier tiles have too few tokens
    tokens = tile.tokens;
    for (int splits = 1; splits <= 8; splits *= 2) {
      if (splits > 1 && int4_split_k_blocks(p.shape, tile.chunks, splits) < 2) break;
      const double time = int4_sync_time(p, tile, splits);
      if (best_time >= 0 && time >= best_time) continue;
      best_time = time;
      best = int4_choice(p, Int4Engine::kSync, i, splits);
    }
  }
  return best;
}

// Chooses the engine and the tile. The engines are tried in the order of their measured speed, and
// the first engine that supports the problem is chosen. The time model then chooses the fastest
// tile of that engine.
inline Int4Choice choose_int4(const Int4Problem& p) {
  if (p.invariant) return choose_int4_wgmma(p);
  for (int i = 0; i < kInt4DecodeTileCount; ++i) {
    if (!int4_decode_refusal(p, kInt4DecodeTiles[i])) {
      return int4_choice(p, Int4Engine::kDecode, i, kInt4DecodeTiles[i].splits);
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
