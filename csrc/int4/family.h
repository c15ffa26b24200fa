// The configurations of a product with a 4-bit weight, for tune. Pure host code.
#pragma once

#include "core/family.h"
#include "int4/config.h"

namespace torchweld {

struct Int4Family : FirstSizeByClass {
  static constexpr const char* kName = "int4";
  static constexpr Field kFields[] = {{"m", 1, kMaxSize},  {"n", 1, kMaxSize},
                                      {"k", 8, kMaxSize},  {"groups", 1, kMaxSize},
                                      {"elem_size", 2, 4}, {"bfloat16", 0, 1}};
  static constexpr const char* kEngines[] = {"decode", "sync", "deep", "wide", "dense"};
  static constexpr bool kFirstLegal = false;

  using Problem = Int4Problem;
  using Choice = Int4Choice;

  static Encoded encode_fields(const Int4Problem& p) {
    return {p.m, p.shape.n, p.shape.k, p.shape.groups, p.elem_size, p.bfloat16};
  }
  static Int4Problem decode_fields(const Encoded& x) {
    return {x[0], {x[1], x[2], x[3]}, x[4] == 4 ? 4 : 2, x[5] != 0, {}};
  }

  static Int4Choice choose(const Int4Problem& p) { return choose_int4(p); }
  static Encoded encode(const Int4Choice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile, choice.parts};
  }

  static Refusal refusal(const Int4Problem& p, const Encoded& x) {
    return int4_refusal(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }
  static Int4Choice make(const Int4Problem& p, const Encoded& x) {
    return int4_choice(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }

  // A tile that can't serve the product at all is listed once.
  static std::vector<Encoded> candidates(const Int4Problem& p) {
    std::vector<Encoded> all;
    for (int i = 0; i < kInt4DecodeTileCount; ++i) {
      all.push_back({number(Int4Engine::kDecode), i, kInt4DecodeTiles[i].parts});
    }
    const auto list = [&](Int4Engine engine, const auto& tiles, int count) {
      using Tile = std::decay_t<decltype(tiles[0])>;
      for (int i = 0; i < count; ++i) {
        const bool serves = !int4_refusal(p, engine, i, 1);
        for (const int parts : kInt4Parts) {
          const bool there = int4_has_parts<Tile>(parts) && (parts == 1 || serves);
          if (there) all.push_back({number(engine), i, parts});
        }
      }
    };
    list(Int4Engine::kSync, kInt4Tiles, kInt4TileCount);
    list(Int4Engine::kDeep, kInt4SmallMTiles, kInt4SmallMTileCount);
    list(Int4Engine::kWide, kInt4LargeMTiles, kInt4LargeMTileCount);
    all.push_back({number(Int4Engine::kDense), 0, 1});
    return all;
  }

  static std::string tile(const Encoded& x) {
    switch (engine(x)) {
      case Int4Engine::kDecode: {
        const Int4DecodeTile& tile = kInt4DecodeTiles[x[1]];
        return tile_text(kInt4TileRows, tile.tokens) + "x" +
               std::to_string(tile.step_chunks() * kInt4ChunkK) + cut(tile.parts);
      }
      case Int4Engine::kSync:
        return tile_text(kInt4Tiles[x[1]].rows, kInt4Tiles[x[1]].tokens, x[2]);
      case Int4Engine::kDeep:
        return tile_text(kInt4SmallMTiles[x[1]].rows, kInt4SmallMTiles[x[1]].tokens, x[2]);
      case Int4Engine::kWide:
        return tile_text(kInt4LargeMTiles[x[1]].rows, kInt4LargeMTiles[x[1]].tokens, x[2]);
      case Int4Engine::kDense:
        break;
    }
    return "";
  }

  // Zeros: the weight is dequantised for the matmul engine.
  static Columns columns(const Int4Problem& p, const Encoded& x) {
    const auto row = [&](const auto& tile, int shared_bytes) -> Columns {
      return {{"rows", tile.rows},
              {"tokens", tile.tokens},
              {"block_k", tile.chunks * kInt4ChunkK},
              {"parts", x[2]},
              {"stages", tile.stages},
              {"warps", tile.warps},
              {"tile_bytes", shared_bytes}};
    };
    switch (engine(x)) {
      case Int4Engine::kDecode: {
        const Int4DecodeTile& tile = kInt4DecodeTiles[x[1]];
        int64_t bytes = 0, blocks = 0;
        if (!int4_decode_refusal(p, tile)) {  // else there is no plan
          const Int4DecodePlan plan(tile, p.m, p.shape, p.device.sms);
          bytes = plan.shared_bytes;
          blocks = int64_t{plan.owners} * tile.parts;
        }
        // A step is being multiplied, the next one on its way.
        return {{"rows", kInt4TileRows},
                {"tokens", tile.tokens},
                {"block_k", tile.step_chunks() * kInt4ChunkK},
                {"parts", tile.parts},
                {"stages", 2},
                {"warps", tile.kWarps},
                {"tile_bytes", bytes},
                {"blocks", blocks}};
      }
      case Int4Engine::kSync:
        return row(kInt4Tiles[x[1]], kInt4Tiles[x[1]].shared_bytes(p.elem_size));
      case Int4Engine::kDeep:
        return row(kInt4SmallMTiles[x[1]], kInt4SmallMTiles[x[1]].shared_bytes());
      case Int4Engine::kWide:
        return row(kInt4LargeMTiles[x[1]], kInt4LargeMTiles[x[1]].shared_bytes());
      case Int4Engine::kDense:
        break;
    }
    return row(Int4Tile{}, 0);
  }

  static std::string kernel(const Int4Problem&, const Encoded& x) {
    switch (engine(x)) {
      case Int4Engine::kDecode:
        return "4-bit decoding (mma.sync, the weight straight to registers)";
      case Int4Engine::kSync:
        return "4-bit tiles (mma.sync)";
      case Int4Engine::kDeep:
      case Int4Engine::kWide:
        return "4-bit tiles (wgmma)";
      case Int4Engine::kDense:
        break;
    }
    return "weight dequantised, then the matmul engine";
  }

  static std::string why(const Int4Problem& p, const Encoded& x) {
    const std::string rows = std::to_string(p.m) + " rows of ";
    switch (engine(x)) {
      case Int4Engine::kDecode:
        return rows + "16-bit x that shared memory holds whole";
      case Int4Engine::kSync:
        return "the smallest tile that holds " + rows + "x";
      case Int4Engine::kDeep:
      case Int4Engine::kWide:
        return "the fastest tile for " + rows + "16-bit x on Hopper";
      case Int4Engine::kDense:
        break;
    }
    return rows + "x, and x is float32 or a group of " +
           std::to_string(p.shape.k / p.shape.groups) + " is no whole chunk of 64";
  }

 private:
  static Int4Engine engine(const Encoded& x) { return static_cast<Int4Engine>(x[0]); }
  static int64_t number(Int4Engine engine) { return static_cast<int64_t>(engine); }
  static std::string cut(int parts) { return parts > 1 ? " /" + std::to_string(parts) : ""; }
};

}  // namespace torchweld
