// Which kernel and tile the norm of a row takes. Pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// A row lives in the registers of `threads` threads, `loads` 16-byte accesses each.
struct NormTile {
  int threads;
  int loads;

  constexpr int64_t capacity(int elem_size) const {
    return static_cast<int64_t>(threads) * loads * (16 / elem_size);
  }
};

// The first that holds the row is taken.
inline constexpr NormTile kNormTiles[] = {{32, 1},  {32, 2},  {32, 3},  {32, 4},  {128, 2},
                                          {128, 4}, {256, 4}, {512, 4}, {1024, 4}};
inline constexpr int kNumNormTiles = sizeof(kNormTiles) / sizeof(kNormTiles[0]);

// Rows that no tile holds are read again for every sum by this many threads.
inline constexpr int kNormStreamThreads = 256;

struct NormProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row and vector starts on a 16-byte boundary

  constexpr bool vector() const { return aligned && n % (16 / elem_size) == 0; }
};

// An index into kNormTiles, or -1 for the streaming kernel.
constexpr int choose_norm_tile(const NormProblem& problem) {
  for (int i = 0; problem.vector() && i < kNumNormTiles; ++i) {
    if (problem.n <= kNormTiles[i].capacity(problem.elem_size)) return i;
  }
  return -1;
}

// The backward's tiles. `blocks` run on an SM at once: their registers and shared memory fit.
struct NormBackwardTile {
  NormTile row;
  int blocks;

  // Single warps hold a row each, four to a block.
  constexpr int rows_per_block() const { return row.threads == 32 ? 4 : 1; }
  constexpr int threads() const { return row.threads * rows_per_block(); }
  // Shared memory of a stage: a row of each input for every row of the block.
  constexpr int stage_bytes(int inputs) const { return threads() * row.loads * 16 * inputs; }
};

inline constexpr NormBackwardTile kNormBackwardTiles[] = {
    {{32, 1}, 8},  {{32, 2}, 4},  {{32, 3}, 4},  {{32, 4}, 3},
    {{128, 2}, 4}, {{256, 2}, 2}, {{512, 2}, 1}, {{512, 4}, 1}};
inline constexpr int kNumNormBackwardTiles =
    sizeof(kNormBackwardTiles) / sizeof(kNormBackwardTiles[0]);

// The rows of a block are on their way in this many stages, the one that is read included.
inline constexpr int kMinNormStages = 2, kMaxNormStages = 4;
// Fewer rows would not be worth a block's partial sums.
inline constexpr int64_t kMinNormBackwardRows = 4;

struct NormBackwardPlan {
  int tile;  // an index into kNormBackwardTiles; -1: dx by the streaming kernel, sums by a pass
  int stages;
  int shared_bytes;
  int64_t blocks;
  int64_t partials;  // fp32 values of scratch for the sums over the rows
};

// `inputs` are 2, or 3 with dsum. `sums` is the number of sums over the rows, 0 where none is
// wanted. `column_partials` is the scratch of a pass for one sum.
constexpr NormBackwardPlan choose_norm_backward(const NormProblem& problem, int64_t rows,
                                                int inputs, int sums, int sms, int shared_limit,
                                                int64_t column_partials) {
  // The driver reserves 1 KiB for every block of an SM.
  constexpr int kReserved = 1024;
  for (int i = 0; problem.vector() && i < kNumNormBackwardTiles; ++i) {
    const NormBackwardTile& tile = kNormBackwardTiles[i];
    if (problem.n > tile.row.capacity(problem.elem_size)) continue;
    const int stage = tile.stage_bytes(inputs);
    const int budget = (shared_limit + kReserved) / tile.blocks - kReserved;
    int stages = budget / stage;
    stages = stages > kMaxNormStages ? kMaxNormStages : stages;
    if (stages < kMinNormStages) stages = kMinNormStages;
    if (stages * stage > shared_limit) break;
    const int64_t block_rows = kMinNormBackwardRows * tile.rows_per_block();
    const int64_t wanted = (rows + block_rows - 1) / block_rows;
    const int64_t at_once = static_cast<int64_t>(sms) * tile.blocks;
    const int64_t blocks = wanted < at_once ? wanted : at_once;
    return {i, stages, stages * stage, blocks, sums * blocks * problem.n};
  }
  // NOTE: the pass always computes both sums.
  return {-1, 0, 0, 0, sums > 0 ? 2 * column_partials : 0};
}

}  // namespace torchweld
