// Describes the engines, tiles and splits of a matmul to `tune` and `explain`. This is pure host
// code.
#pragma once

#include "core/family.h"
#include "gemm/config.h"

namespace torchweld {

struct GemmFamily {
  static constexpr const char* kName = "matmul";
  static constexpr Field kFields[] = {
      {"m", 1, kMaxSize},  {"n", 1, kMaxSize},  {"k", 0, kMaxSize}, {"batch", 1, kMaxSize},
      {"gated", 0, 1},     {"pointwise", 0, 1}, {"math", 0, 3},     {"a_k_major", 0, 1},
      {"b_k_major", 0, 1}, {"normed", 0, 1},    {"grouped", 0, 2},  {"invariant", 0, 1}};
  static constexpr const char* kEngines[] = {"sync", "sm90", "rows"};
  static constexpr bool kFirstLegal = false;

  using Problem = GemmProblem;
  using Choice = GemmChoice;

  static Encoded encode_fields(const GemmProblem& p) {
    return {p.m,
            p.n,
            p.k,
            p.batch,
            p.gated,
            p.pointwise,
            static_cast<int64_t>(p.math),
            p.a_k_major,
            p.b_k_major,
            p.normed,
            static_cast<int64_t>(p.grouped),
            p.invariant};
  }
  static GemmProblem decode_fields(const Encoded& x) {
    return {x[0],
            x[1],
            x[2],
            x[3],
            x[4] != 0,
            x[5] != 0,
            static_cast<GemmMath>(x[6]),
            x[7] != 0,
            x[8] != 0,
            x[9] != 0,
            {},
            static_cast<Grouped>(x[10]),
            x[11] != 0};
  }
  static Encoded shape_class(Encoded x) {
    x[0] = size_class(x[0]);
    x[3] = size_class(x[3]);
    return x;
  }

  static GemmChoice choose(const GemmProblem& p) { return choose_gemm(p); }
  static Encoded encode(const GemmChoice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile, choice.splits};
  }

  static Refusal refusal(const GemmProblem& p, const Encoded& x) {
    return gemm_refusal(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }
  static GemmChoice make(const GemmProblem& p, const Encoded& x) {
    return gemm_choice(p, engine(x), static_cast<int>(x[1]), static_cast<int>(x[2]));
  }

  // Lists pairs of a tile and a number of splits of K. Every tile is listed with splits = 1, even
  // if it can't run the problem. A pair with another value of `splits` is listed only if the tile
  // can run the problem with this value.
  static std::vector<Encoded> candidates(const GemmProblem& p) {
    std::vector<Encoded> all;
    for_each_gemm_choice([&](GemmEngine engine, int tile, int splits) {
      if (splits == 1 || !gemm_refusal(p, engine, tile, splits)) {
        all.push_back({static_cast<int64_t>(engine), tile, splits});
      }
    });
    return all;
  }

  static std::string tile(const Encoded& x) {
    if (engine(x) == GemmEngine::kSm90) {
      const sm90::Tile& tile = sm90::kTiles[x[1]];
      return (tile.fp32 ? "float32 " : "") + tile_text(tile.block_m, tile.block_n) +
             (tile.swap_ab() ? " swap_ab" : "") + (tile.pingpong ? " ping-pong" : "") +
             (tile.cluster > 1 ? " cluster " + std::to_string(tile.cluster) : "") +
             (x[2] == kStreamK ? " stream-K" : "");
    }
    if (engine(x) == GemmEngine::kRows) {
      const RowsTile& tile = kRowsTiles[x[1]];
      return tile_text(RowsTile::kRows, tile.columns) + (tile.chain ? " one chain" : "");
    }
    const SyncTile& tile = kSyncTiles[x[1]];
    return (tile.fp32 ? "float32 " : "") + tile_text(tile.block_m, tile.block_n, x[2]);
  }

  static Columns columns(const GemmProblem& p, const Encoded& x) {
    const auto row = [&](int block_m, int block_n, int block_k, int stages, int warps,
                         int cluster) -> Columns {
      return {{"block_m", block_m}, {"block_n", block_n}, {"block_k", block_k}, {"splits", x[2]},
              {"stages", stages},   {"warps", warps},     {"cluster", cluster}};
    };
    if (engine(x) == GemmEngine::kSm90) {
      const sm90::Tile& tile = sm90::kTiles[x[1]];
      return row(tile.block_m, tile.block_n, sm90::k_block_size(p.math), tile.stages,
                 sm90::Tile::kThreads / 32, tile.cluster);
    }
    if (engine(x) == GemmEngine::kRows) {
      const RowsTile& tile = kRowsTiles[x[1]];
      return row(RowsTile::kRows, tile.columns, p.block_k(), tile.stages, tile.warps(), 1);
    }
    const SyncTile& tile = kSyncTiles[x[1]];
    return row(tile.block_m, tile.block_n, p.block_k(), tile.stages, tile.warps_m * tile.warps_n,
               1);
  }

  static std::string kernel(const GemmProblem& p, const Encoded& x) {
    if (engine(x) == GemmEngine::kSm90) return "matmul engine (wgmma)";
    if (engine(x) == GemmEngine::kSync) return "matmul engine (mma.sync)";
    return p.normed ? "matmul engine (few rows, norm in front)" : "matmul engine (few rows)";
  }
  static std::string why(const GemmProblem&, const Encoded&) { return kWhyFastest; }

 private:
  static GemmEngine engine(const Encoded& x) { return static_cast<GemmEngine>(x[0]); }
};

}  // namespace torchweld
