// Chooses the engine and the tile of a matmul. This is pure host code: the launchers,
// torchweld.explain and the CPU tests read the same tables.
//
// Each engine has two functions that take a problem and a tile of the engine. ..._refusal returns
// why the tile can't run the problem. ..._seconds estimates the time that the tile needs.
// choose_gemm picks the fastest legal tile of all engines.
#pragma once

#include "gemm/rows/tiles.h"
#include "gemm/sm90/tiles.h"
#include "gemm/sync/tiles.h"

namespace torchweld {

// kSync uses mma.sync, for sm_80 and newer. kSm90 uses Hopper's wgmma and TMA. kRows is for
// products with up to 16 rows of a.
enum class GemmEngine : int8_t { kSync, kSm90, kRows };

// Returns the number of floats in a row of a split-K partial in the workspace. n is the number of
// columns of y. The result is n rounded up to a multiple of 8, or twice this number if gated.
constexpr int64_t gemm_sum_width(int64_t n, bool gated) {
  return (n + 7) / 8 * 8 * (gated ? 2 : 1);
}

struct GemmChoice {
  GemmEngine engine;
  int tile;         // index into the engine's table of tiles
  int splits;       // the number of splits of K, or kStreamK; negative if no tile is legal
  int64_t k_split;  // the number of elements of K in each split; a multiple of the k-block

  int64_t workspace_floats(const GemmProblem& p) const {
    if (splits == kStreamK) return sm90::workspace_floats(p, sm90::kTiles[tile]);
    return splits == 1 ? 0 : splits * p.batch * p.m * gemm_sum_width(p.n, p.gated);
  }
  // Some kernels can also compute the sum of each row of a during the product. In the product for a
  // weight gradient a is dy^T, so these sums are the gradient of the bias. Returns the number of
  // partial sums that the kernel writes per row of a, or 0 if the kernel can't compute these sums.
  int64_t dbias_partials(const GemmProblem& p) const {
    if (engine != GemmEngine::kSm90 || !sm90::kTiles[tile].supports_dbias(p)) return 0;
    return sm90::kTiles[tile].tiles_n(p.m, p.width());
  }
  // Returns the number of flags in global memory. Each stream-K partial has a flag that says that
  // the partial is stored. Other products need no flags.
  int64_t flags(const GemmProblem& p) const {
    return splits == kStreamK ? int64_t{sm90::Tile::kWarpgroups} * p.device.sms : 0;
  }
};

// Whether a kernel adds up K as one chain of k16 steps, from the first to the last. All such
// kernels of a dtype give the same bits. In fp32 the two engines add the products of the bf16 terms
// in different orders; the batch-invariant mode uses Hopper's engine if the GPU has it.
inline bool gemm_is_invariant(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  if (splits != 1) return false;
  if (engine == GemmEngine::kRows) return kRowsTiles[tile].chain;
  const bool has_sm90 = p.device.wgmma && p.device.tma && p.grouped == Grouped::kNone && p.k > 0;
  return gemm_elem_size(p.math) == 2 || (engine == GemmEngine::kSm90) == has_sm90;
}

inline Refusal gemm_refusal(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  if (p.invariant && !gemm_is_invariant(p, engine, tile, splits)) return kOtherSums;
  if (engine == GemmEngine::kSm90)
    return sm90::tile_refusal(p, sm90::kTiles[tile], splits == kStreamK);
  if (engine == GemmEngine::kRows) return rows_refusal(p, kRowsTiles[tile], splits);
  return sync_refusal(p, kSyncTiles[tile], splits);
}

inline double gemm_seconds(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  if (engine == GemmEngine::kSm90)
    return sm90::tile_seconds(p, sm90::kTiles[tile], splits == kStreamK);
  if (engine == GemmEngine::kRows) return rows_seconds(p, kRowsTiles[tile]);
  return sync_seconds(p, kSyncTiles[tile], splits);
}

inline GemmChoice gemm_choice(const GemmProblem& p, GemmEngine engine, int tile, int splits) {
  const int parts = std::max(splits, 1);
  return {engine, tile, splits, (p.k_blocks() + parts - 1) / parts * p.block_k()};
}

// Calls body(engine, tile, splits) for every combination of an engine, a tile and a number of
// splits, even if the combination is not legal.
template <typename Body>
void for_each_gemm_choice(const Body& body) {
  for (int tile = 0; tile < kSyncTileCount; ++tile) {
    for (const int splits : kGemmSplits) body(GemmEngine::kSync, tile, splits);
  }
  for (int tile = 0; tile < sm90::kTileCount; ++tile) {
    for (const int splits : {1, kStreamK}) body(GemmEngine::kSm90, tile, splits);
  }
  for (int tile = 0; tile < kRowsTileCount; ++tile) body(GemmEngine::kRows, tile, 1);
}

inline GemmChoice choose_gemm(const GemmProblem& p) {
  constexpr int64_t kMinKBlocks = 4;  // the minimum number of k-blocks per split
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
