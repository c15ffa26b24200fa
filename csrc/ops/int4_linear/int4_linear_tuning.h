// The configurations of a product with a 4-bit weight, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/int4_linear/int4_linear_config.h"

namespace torchweld {

struct Int4Call {
  Int4Problem problem;
  bool bfloat16;
};

struct Int4Tuning {
  static constexpr const char* kName = "int4";
  static constexpr Field kProblem[] = {{"m", 1, kMostSize},
                                       {"n", 1, kMostSize},
                                       {"k", 8, kMostSize},
                                       {"groups", 1, kMostSize},
                                       {"elem_size", 2, 4},
                                       {"sms", 1, kMostMultiprocessors},
                                       {"shared_limit", 0, kMostSharedBytes},
                                       {"clusters", 0, 1},
                                       {"warpgroups", 0, 1},
                                       {"bfloat16", 0, 1}};
  static constexpr const char* kChoice[] = {"tile", "parts"};

  using Problem = Int4Call;
  using Choice = Int4Choice;

  static Numbers numbers(const Int4Call& call) {
    const Int4Problem& p = call.problem;
    return {p.m,   p.shape.n,      p.shape.k,  p.shape.groups, p.elem_size,
            p.sms, p.shared_limit, p.clusters, p.warpgroups,   call.bfloat16};
  }
  static Int4Call problem(const Numbers& x) {
    return {{x[0],
             {x[1], x[2], x[3]},
             x[4] == 4 ? 4 : 2,
             static_cast<int>(x[5]),
             static_cast<int>(x[6]),
             x[7] != 0,
             x[8] != 0},
            x[9] != 0};
  }
  static Numbers key(Numbers x) {
    x[0] = size_class(x[0]);
    return x;
  }

  static Int4Choice choose(const Int4Call& call) { return choose_int4(call.problem); }
  static Numbers told(const Int4Choice& choice) { return {choice.tile, choice.parts}; }

  static const Int4WideTile& wide_tile(int64_t tile) {
    return kInt4WideTiles[tile - kInt4FirstWide];
  }
  static const Int4DeepTile& deep_tile(int64_t tile) {
    return kInt4DeepTiles[tile - kInt4FirstDeep];
  }

  static bool is_decode(int64_t tile) { return tile >= kInt4TileCount && tile < kInt4FirstWide; }
  static const Int4DecodeTile& decode_tile(int64_t tile) {
    return kInt4DecodeTiles[tile - kInt4TileCount];
  }

  static std::string refusal(const Int4Call& call, const Numbers& choice) {
    const Int4Problem& p = call.problem;
    const int64_t parts = choice[1];
    if (choice[0] == -1) return parts == 1 ? "" : "a weight that is dequantised is not cut";
    constexpr int kCount = kInt4FirstDeep + kInt4DeepTileCount;
    if (choice[0] < 0 || choice[0] >= kCount) return no_such_tile(choice[0], kCount);
    if (is_decode(choice[0])) {
      const Int4DecodeTile& tile = decode_tile(choice[0]);
      if (parts != tile.parts) return "the tile has another number of parts";
      const char* why = int4_decode_refusal(p, tile);
      return why == nullptr ? "" : why;
    }
    if (choice[0] >= kInt4FirstWide) {
      if (const char* why = int4_wide_refusal(p)) return why;
      if (choice[0] < kInt4FirstDeep) return wide_refusal(p, wide_tile(choice[0]), parts);
      if (p.m > kInt4DeepTokens) return "the tile is for fewer rows of x";
      return wide_refusal(p, deep_tile(choice[0]), parts);
    }
    const Int4Tile& tile = kInt4Tiles[choice[0]];
    if (!tile.suits(p.elem_size, p.whole_chunks())) {
      return "the tile is for 16-bit x and groups of a multiple of 64";
    }
    if (tile.shared_bytes(p.elem_size) > p.shared_limit) {
      return too_much_shared_memory(tile.shared_bytes(p.elem_size), p.shared_limit);
    }
    return parts_refusal(p, tile, parts);
  }

  template <typename Tile>
  static std::string wide_refusal(const Int4Problem& p, const Tile& tile, int64_t parts) {
    if (tile.shared_bytes() > p.shared_limit) {
      return too_much_shared_memory(tile.shared_bytes(), p.shared_limit);
    }
    return parts_refusal(p, tile, parts);
  }

  template <typename Tile>
  static std::string parts_refusal(const Int4Problem& p, const Tile& tile, int64_t parts) {
    if (!int4_has_parts<Tile>(parts)) {
      return Tile::kThirds ? "K can be cut into 1, 2, 3, 4 or 8 parts"
                           : "K can be cut into 1, 2, 4 or 8 parts";
    }
    if (int4_part_steps(p.shape, tile.chunks, static_cast<int>(parts)) == 0) {
      const int64_t all = int4_part_steps(p.shape, tile.chunks, 1);
      return "K has " + std::to_string(all) + " steps, which leaves one of " +
             std::to_string(parts) + " parts empty";
    }
    const double blocks = (double(p.shape.n) / tile.rows + 1) * (double(p.m) / tile.tokens + 1) *
                          static_cast<double>(parts);
    return grid_fits(blocks) ? "" : "more than 2^31 - 1 tiles";
  }

  static Int4Choice make(const Int4Call& call, const Numbers& choice) {
    const Int4Problem& p = call.problem;
    const int parts = static_cast<int>(choice[1]);
    if (choice[0] < 0) return {-1, 1, p.shape.chunks(), false};
    if (is_decode(choice[0])) {
      return int4_decode_choice(p, static_cast<int>(choice[0]) - kInt4TileCount);
    }
    const int chunks = choice[0] >= kInt4FirstDeep   ? deep_tile(choice[0]).chunks
                       : choice[0] >= kInt4FirstWide ? wide_tile(choice[0]).chunks
                                                     : kInt4Tiles[choice[0]].chunks;
    const int64_t part_chunks = int4_part_steps(p.shape, chunks, parts) * chunks;
    return {static_cast<int>(choice[0]), parts, part_chunks, parts > 1 && p.clusters};
  }

  // A tile that can't serve the product at all is listed once.
  static std::vector<Numbers> candidates(const Int4Call& call) {
    std::vector<Numbers> all;
    for (int tile = 0; tile < kInt4FirstDeep + kInt4DeepTileCount; ++tile) {
      if (is_decode(tile)) {
        all.push_back({tile, decode_tile(tile).parts});
        continue;
      }
      const bool serves = refusal(call, {tile, 1}).empty();
      for (const int parts : kInt4Parts) {
        if (parts == 3 && tile < kInt4FirstDeep) continue;
        if (parts == 1 || serves) all.push_back({tile, parts});
      }
    }
    all.push_back({-1, 1});
    return all;
  }

  // Zeros: the weight is dequantised for the matmul engine.
  static Columns columns(const Int4Call&, const Numbers& choice) {
    if (choice[0] >= kInt4FirstDeep) {
      const Int4DeepTile& tile = deep_tile(choice[0]);
      return {{"rows", tile.rows},  {"tokens", tile.tokens}, {"block_k", tile.chunks * kInt4ChunkK},
              {"parts", choice[1]}, {"stages", tile.stages}, {"warps", tile.warps}};
    }
    if (choice[0] >= kInt4FirstWide) {
      const Int4WideTile& tile = wide_tile(choice[0]);
      return {{"rows", tile.rows},  {"tokens", tile.tokens}, {"block_k", tile.chunks * kInt4ChunkK},
              {"parts", choice[1]}, {"stages", tile.stages}, {"warps", tile.warps}};
    }
    if (choice[0] >= kInt4TileCount) {
      const Int4DecodeTile& tile = decode_tile(choice[0]);
      // A step is being multiplied, the next one on its way.
      return {{"rows", kInt4TileRows},
              {"tokens", tile.tokens},
              {"block_k", tile.step_chunks() * kInt4ChunkK},
              {"parts", tile.parts},
              {"stages", 2},
              {"warps", tile.kWarps}};
    }
    const Int4Tile tile = choice[0] < 0 ? Int4Tile{} : kInt4Tiles[choice[0]];
    return {{"rows", tile.rows},  {"tokens", tile.tokens}, {"block_k", tile.chunks * kInt4ChunkK},
            {"parts", choice[1]}, {"stages", tile.stages}, {"warps", tile.warps}};
  }
};

}  // namespace torchweld
