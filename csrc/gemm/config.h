// Chooses the engine and tile of a product. Pure host code: the launchers, torchweld.explain and
// the CPU tests read the same tables.
//
// For a problem and a tile an engine says why it can't run (refusal), and how long it would run
// (seconds). The choice is the fastest legal one over all engines.
#pragma once

#include "gemm/rows/tiles.h"
#include "gemm/sm90/tiles.h"
#include "gemm/sync/tiles.h"

namespace torchweld {

// kSync: mma.sync, for sm_80 and newer. kSm90: Hopper's wgmma and TMA. kRows: up to 16 rows.
enum class GemmEngine : int8_t { kSync, kSm90, kRows };

// Floats in a row of split sums: y's columns rounded up to 8, twice where gated.
constexpr int64_t gemm_sum_width(int64_t n, bool gated) {
  return (n + 7) / 8 * 8 * (gated ? 2 : 1);
}

struct GemmChoice {
  GemmEngine engine;
  int tile;         // index into the engine's tiles
  int splits;       // of K, or kStreamK; negative where no tile is legal
  int64_t k_split;  // elements of K in a split, a multiple of a k-block

  int64_t workspace_floats(const GemmProblem& p) const {
    if (splits == kStreamK) return sm90_workspace_floats(p, kSm90Tiles[tile]);
    return splits == 1 ? 0 : splits * p.batch * p.m * gemm_sum_width(p.n, p.gated);
  }
  // How many partial sums of each row of a the kernel computes beside the product. In a weight's
  // gradient they add up to the bias's. 0 where the kernel computes none.
  int64_t dbias_partials(const GemmProblem& p) const {
    if (engine != GemmEngine::kSm90 || !kSm90Tiles[tile].supports_dbias(p)) return 0;
    return kSm90Tiles[tile].tiles_n(p.m, p.width());
  }
  // Number of ready flags, one a partial.
  int64_t flags(const GemmProblem& p) const {
    return splits == kStreamK ? int64_t{Sm90Tile::kWarpgroups} * p.device.sms : 0;
  }
};

inline Refusal gemm_refusal(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  if (engine == GemmEngine::kSm90) return sm90_refusal(p, kSm90Tiles[tile], splits == kStreamK);
  if (engine == GemmEngine::kRows) return rows_refusal(p, kRowsTiles[tile], splits);
  return sync_refusal(p, kSyncTiles[tile], splits);
}

inline double gemm_seconds(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  if (engine == GemmEngine::kSm90) return sm90_seconds(p, kSm90Tiles[tile], splits == kStreamK);
  if (engine == GemmEngine::kRows) return rows_seconds(p, kRowsTiles[tile]);
  return sync_seconds(p, kSyncTiles[tile], splits);
}

inline GemmChoice gemm_choice(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  const int parts = std::max(splits, 1);
  return {engine, tile, splits, (p.k_blocks() + parts - 1) / parts * p.block_k()};
}

// Calls body(engine, tile, splits) for every configuration.
template <typename Body>
void for_each_gemm_choice(const Body& body) {
  for (int tile = 0; tile < kSyncTileCount; ++tile) {
    for (const int splits : kGemmSplits) body(GemmEngine::kSync, tile, splits);
  }
  for (int tile = 0; tile < kSm90TileCount; ++tile) {
    for (const int splits : {1, kStreamK}) body(GemmEngine::kSm90, tile, splits);
  }
  for (int tile = 0; tile < kRowsTileCount; ++tile) body(GemmEngine::kRows, tile, 1);
}

inline GemmChoice choose_gemm(const GemmProblem& p) {
  constexpr int64_t kMinKBlocks = 4;  // of a split
  GemmChoice best{};
  best.splits = -1;
  double best_time = -1;
  for_each_gemm_choice([&](GemmEngine engine, int tile, int splits) {
    if (splits > 1 && p.k_blocks() < kMinKBlocks * splits) return;
    if (gemm_refusal(p, engine, tile, splits)) return;
    const double time = gemm_seconds(p, engine, tile, splits);
    if (best_time >= 0 && time >= best_time) return;
    best_time = time;
    best = gemm_choice(p, engine, tile, splits);
  });
  return best;
}

}  // namespace torchweld
