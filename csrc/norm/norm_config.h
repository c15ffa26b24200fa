// Chooses the kernel and the tile for LayerNorm and RMSNorm. This is pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// A tile of `threads` threads holds one row in registers. Each thread makes up to `loads` loads of
// 16 bytes.
struct NormTile {
  int threads;
  int loads;

  constexpr int64_t capacity(int elem_size) const {
    return static_cast<int64_t>(threads) * loads * (16 / elem_size);
  }
};

// choose_norm_tile chooses the first tile that can hold the row.
inline constexpr NormTile kNormTiles[] = {{32, 1},  {32, 2},  {32, 3},  {32, 4},  {128, 2},
                                          {128, 4}, {256, 4}, {512, 4}, {1024, 4}};
inline constexpr int kNumNormTiles = sizeof(kNormTiles) / sizeof(kNormTiles[0]);

// The number of threads per block of the streaming kernel. The streaming kernel is for rows that
// fit in no tile. It reads a row again for every reduction.
inline constexpr int kNormStreamThreads = 256;

struct NormProblem {
  int64_t n;      // the length of a row
  int elem_size;  // size of an element in bytes
  bool aligned;   // whether every row and every vector starts on a 16-byte boundary

  constexpr bool vector() const { return aligned && n % (16 / elem_size) == 0; }
};

// Returns the index of a tile in kNormTiles, or -1 for the streaming kernel.
constexpr int choose_norm_tile(const NormProblem& problem) {
  for (int i = 0; problem.vector() && i < kNumNormTiles; ++i) {
    if (problem.n <= kNormTiles[i].capacity(problem.elem_size)) return i;
  }
  return -1;
}

// A tile of the backward kernel. The registers and the shared memory of an SM are large enough for
// `blocks` blocks of this tile at once.
struct NormBackwardTile {
  NormTile row;
  int blocks;

  // If one warp holds a row, a block has four warps, so it processes four rows at once.
  constexpr int rows_per_block() const { return row.threads == 32 ? 4 : 1; }
  constexpr int threads() const { return row.threads * rows_per_block(); }
  // The bytes of one stage in shared memory. A stage holds rows_per_block() rows of each input.
  constexpr int stage_bytes(int inputs) const { return threads() * row.loads * 16 * inputs; }
};

inline constexpr NormBackwardTile kNormBackwardTiles[] = {
    {{32, 1}, 8},  {{32, 2}, 4},  {{32, 3}, 4},  {{32, 4}, 3},
    {{128, 2}, 4}, {{256, 2}, 2}, {{512, 2}, 1}, {{512, 4}, 1}};
inline constexpr int kNumNormBackwardTiles =
    sizeof(kNormBackwardTiles) / sizeof(kNormBackwardTiles[0]);

// The limits of the number of stages in the shared-memory ring. The threads read one stage while
// the copies into the other stages are in flight.
inline constexpr int kMinNormStages = 2, kMaxNormStages = 4;
// The minimum number of rows that a block processes one after the other. If one warp holds a row,
// this is the minimum per warp. A smaller minimum would give more blocks. Their partial sums would
// cost more than the additional parallelism gains.
inline constexpr int64_t kMinNormBackwardRows = 4;

struct NormBackwardPlan {
  int tile;  // the index in kNormBackwardTiles, or -1 for the streaming kernel
  int stages;
  int shared_bytes;
  int64_t blocks;
  int64_t partials;  // the number of fp32 values of workspace for the sums over the rows
};

// `inputs` is the number of matrices that the kernel reads: dy, x and, if given, dsum. `sums` is
// the number of vector gradients: 0 if none is requested, 1 for dscale, 2 for dscale and dshift.
// `column_partials` is the number of workspace values per sum that the kernel of
// vectors_backward.cu needs.
constexpr NormBackwardPlan choose_norm_backward(const NormProblem& problem, int64_t rows,
                                                int inputs, int sums, int sms, int shared_limit,
                                                int64_t column_partials) {
  // CUDA reserves 1 KiB of shared memory for every resident block of an SM.
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
  // NOTE: launch_norm_vectors_backward always computes both sums, so it needs workspace for two
  // sums.
  return {-1, 0, 0, 0, sums > 0 ? 2 * column_partials : 0};
}

}  // namespace torchweld
