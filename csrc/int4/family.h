// The kernel family of matmuls with a 4-bit weight. This is pure host code.
#pragma once

#include "core/family.h"
#include "int4/config.h"

namespace torchweld {

struct Int4Family : FirstSizeByClass {
  static constexpr const char* kName = "int4";
  static constexpr Field kFields[] = {
      {"m", 1, kMaxSize},  {"n", 1, kMaxSize}, {"k", 8, kMaxSize}, {"groups", 1, kMaxSize},
      {"elem_size", 2, 4}, {"bfloat16", 0, 1}, {"invariant", 0, 1}};
  static constexpr const char* kEngines[] = {"decode", "sync", "small_m", "large_m", "dense"};
  static constexpr bool kFirstLegal = false;

  using Problem = Int4Problem;
  using Choice = Int4Choice;

  static Encoded encode_fields(const Int4Problem& p) {
    return {p.m, p.shape.n, p.shape.k, p.shape.groups, p.elem_size, p.bfloat16, p.invariant};
  }
  static Int4Problem decode_fields(const Encoded& x) {
    return {x[0], {x[1], x[2], x[3]}, x[4] == 4 ? 4 : 2, x[5] != 0, {}, x[6] != 0};
  }

  static Int4Choice choose(const Int4Problem& p) { return choose_int4(p); }
  static Encoded encode(const Int4Choice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile, choice.splits};
  }

  static Refusal refusal(const Int4Problem& p, const Encoded& x) {
    return int4_refusal(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }
  static Int4Choice make(const Int4Problem& p, const Encoded& x) {
    return int4_choice(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }

  // Lists every tile. A legal tile that has kernels for several numbers of splits is listed once
  // for each of these numbers.
  static std::vector<Encoded> candidates(const Int4Problem& p) {
    std::vector<Encoded> all;
    for (int i = 0; i < kInt4DecodeTileCount; ++i) {
      all.push_back({number(Int4Engine::kDecode), i, kInt4DecodeTiles[i].splits});
    }
    const auto list = [&](Int4Engine engine, const auto& tiles, int count) {
      using Tile = std::decay_t<decltype(tiles[0])>;
      for (int i = 0; i < count; ++i) {
        const bool legal = !int4_refusal(p, engine, i, 1);
        for (const int splits : kInt4Splits) {
          const bool listed = int4_allows_splits<Tile>(splits) && (splits == 1 || legal);
          if (listed) all.push_back({number(engine), i, splits});
        }
      }
    };
    list(Int4Engine::kSync, kInt4Tiles, kInt4TileCount);
    list(Int4Engine::kSmallM, kInt4SmallMTiles, kInt4SmallMTileCount);
    list(Int4Engine::kLargeM, kInt4LargeMTiles, kInt4LargeMTileCount);
    all.push_back({number(Int4Engine::kDense), 0, 1});
    return all;
  }

  static std::string tile(const Encoded& x) {
    switch (engine(x)) {
      case Int4Engine::kDecode: {
        const Int4DecodeTile& tile = kInt4DecodeTiles[x[1]];
        return tile_text(kInt4TileRows, tile.tokens) + "x" +
               std::to_string(tile.k_block_chunks() * kInt4ChunkK) + splits_text(tile.splits);
      }
      case Int4Engine::kSync:
        return tile_text(kInt4Tiles[x[1]].rows, kInt4Tiles[x[1]].tokens, x[2]);
      case Int4Engine::kSmallM:
        return tile_text(kInt4SmallMTiles[x[1]].rows, kInt4SmallMTiles[x[1]].tokens, x[2]);
      case Int4Engine::kLargeM:
        return tile_text(kInt4LargeMTiles[x[1]].rows, kInt4LargeMTiles[x[1]].tokens, x[2]);
      case Int4Engine::kDense:
        break;
    }
    return "";
  }

  // For kDense all columns but `splits` are 0, because kDense calls the matmul engine.
  static Columns columns(const Int4Problem& p, const Encoded& x) {
    const auto row = [&](const auto& tile, int shared_bytes) -> Columns {
      return {{"rows", tile.rows},
              {"tokens", tile.tokens},
              {"block_k", tile.chunks * kInt4ChunkK},
              {"splits", x[2]},
              {"stages", tile.stages},
              {"warps", tile.warps},
              {"tile_bytes", shared_bytes}};
    };
    switch (engine(x)) {
      case Int4Engine::kDecode: {
        const Int4DecodeTile& tile = kInt4DecodeTiles[x[1]];
        int64_t bytes = 0, blocks = 0;
        if (!int4_decode_refusal(p, tile)) {  // an illegal tile has no plan
          const Int4DecodePlan plan(tile, p.m, p.shape, p.device.sms);
          bytes = plan.shared_bytes;
          blocks = int64_t{plan.owners} * tile.splits;
        }
        // The number of stages is two: one k-block is multiplied while the next k-block is loaded.
        return {{"rows", kInt4TileRows},
                {"tokens", tile.tokens},
                {"block_k", tile.k_block_chunks() * kInt4ChunkK},
                {"splits", tile.splits},
                {"stages", 2},
                {"warps", tile.kWarps},
                {"tile_bytes", bytes},
                {"blocks", blocks}};
      }
      case Int4Engine::kSync:
        return row(kInt4Tiles[x[1]], kInt4Tiles[x[1]].shared_bytes(p.elem_size));
      case Int4Engine::kSmallM:
        return row(kInt4SmallMTiles[x[1]], kInt4SmallMTiles[x[1]].shared_bytes());
      case Int4Engine::kLargeM:
        return row(kInt4LargeMTiles[x[1]], kInt4LargeMTiles[x[1]].shared_bytes());
      case Int4Engine::kDense:
        break;
    }
    return row(Int4Tile{}, 0);
  }

  static std::string kernel(const Int4Problem&, const Encoded& x) {
    switch (engine(x)) {
      case Int4Engine::kDecode:
        return "4-bit decoding (mma.sync, weight loaded directly into registers)";
      case Int4Engine::kSync:
        return "4-bit tiles (mma.sync)";
      case Int4Engine::kSmallM:
      case Int4Engine::kLargeM:
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
        return rows + "16-bit x fit into shared memory";
      case Int4Engine::kSync:
        return "the smallest tile that holds " + rows + "x";
      case Int4Engine::kSmallM:
      case Int4Engine::kLargeM:
        return "the fastest tile for " + rows + "16-bit x on Hopper";
      case Int4Engine::kDense:
        break;
    }
    return rows + "x, and x is float32 or a group of " +
           std::to_string(p.shape.k / p.shape.groups) + " is not a multiple of 64";
  }

 private:
  static Int4Engine engine(const Encoded& x) { return static_cast<Int4Engine>(x[0]); }
  static int64_t number(Int4Engine engine) { return static_cast<int64_t>(engine); }
  static std::string splits_text(int splits) {
    return splits > 1 ? " /" + std::to_string(splits) : "";
  }
};

}  // namespace torchweld
