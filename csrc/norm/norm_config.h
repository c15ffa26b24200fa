// Chooses the kernel and the tile of a row norm. This is pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// `threads` threads hold one row in registers. Each makes up to `loads` loads of 16 bytes.
struct NormTile {
  int threads;
  int loads;

  constexpr int64_t capacity(int elem_size) const {
    return static_cast<int64_t>(threads) * loads * (16 / elem_size);
  }
};

// choose_norm_tile takes the first tile that can hold the row.
inline constexpr NormTile kNormTiles[] = {{32, 1},  {32, 2},  {32, 3},  {32, 4},  {128, 2},
                                          {128, 4}, {256, 4}, {512, 4}, {1024, 4}};
inline constexpr int kNumNormTiles = sizeof(kNormTiles) / sizeof(kNormTiles[0]);

// The block size of the streaming kernel. It processes rows that fit in no tile and reads each row
// again for every reduction.
inline constexpr int kNormStreamThreads = 256;

struct NormProblem {
  int64_t n;      // the length of a row
  int elem_size;  // in bytes
  bool aligned;   // every row and every vector starts on a 16-byte boundary

  constexpr bool vector() const { return aligned && n % (16 / elem_size) == 0; }
};

// Returns an index into kNormTiles, or -1 for the streaming kernel.
constexpr int choose_norm_tile(const NormProblem& problem) {
  for (int i = 0; problem.vector() && i < kNumNormTiles; ++i) {
    if (problem.n <= kNormTiles[i].capacity(problem.elem_size)) return i;
  }
  return -1;
}

// A tile of the backward kernel. An SM runs `blocks` blocks of this tile at once: their registers
// and shared memory fit.
struct NormBackwardTile {
  NormTile row;
  int blocks;

  // If one warp holds a row, a block has four warps and so processes four rows at once.
  constexpr int rows_per_block() const { return row.threads == 32 ? 4 : 1; }
  constexpr int threads() const { return row.threads * rows_per_block(); }
  // The shared memory of one stage, which holds the block's current rows of each input.
  constexpr int stage_bytes(int inputs) const { return threads() * row.loads * 16 * inputs; }
};

inline constexpr NormBackwardTile kNormBackwardTiles[] = {
    {{32, 1}, 8},  {{32, 2}, 4},  {{32, 3}, 4},  {{32, 4}, 3},
    {{128, 2}, 4}, {{256, 2}, 2}, {{512, 2}, 1}, {{512, 4}, 1}};
inline constexpr int kNumNormBackwardTiles =
    sizeof(kNormBackwardTiles) / sizeof(kNormBackwardTiles[0]);

// The number of stages of the shared-memory ring. One stage is being read while the copies into the
// others are in flight.
inline constexpr int kMinNormStages = 2, kMaxNormStages = 4;
// The minimum number of rows per block or, if one warp holds a row, per warp. With fewer, the cost
// of the block's partial sums outweighs the gain in parallelism.
inline constexpr int64_t kMinNormBackwardRows = 4;

struct NormBackwardPlan {
  int tile;  // an index into kNormBackwardTiles, or -1 to compute dx by the streaming kernel
  int stages;
  int shared_bytes;
  int64_t blocks;
  int64_t partials;  // the size of the workspace of the sums over the rows, in fp32 values
};

// `inputs` is the number of matrices that the kernel reads: dy, x and, if given, dsum. `sums` is
// the number of vector gradients: 0 if none is requested, 1 for dscale, 2 for dscale and dshift.
// `column_partials` is the workspace that the separate kernel (vectors_backward.cu) needs per sum.
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
  // NOTE: launch_norm_vectors_backward always computes both sums, so it needs the workspace of
  // both.
  return {-1, 0, 0, 0, sums > 0 ? 2 * column_partials : 0};
}

}  // namespace torchweld
