// One pass over a (rows, n) matrix: what the host hands to the kernels, what an op computes in a
// cell, and how the pass is cut into blocks. Pure host code; tested without a GPU.
//
// An op is a functor of a Cell with the constants kReads (matrices that it reads, 0 to 2),
// kRowValues, kColumnValues, kWrites, kRowSums and kColumnSums. Cells outside of the matrix are
// seen with zeros in `in`, x and y, and must then add nothing to the sums.
#pragma once

#include <cstdint>
#include <numeric>

#include "core/dtype.h"
#include "core/mask.h"

namespace torchweld {

template <typename F>
struct Cell {
  F in[2];
  F x;  // the column's value
  F y;  // the row's value
  F out;
  F to_row, to_column;  // what the cell adds to its row's and its column's sum
};

struct MatrixPassParams {
  const void* in[2];  // (rows, n), columns adjacent; nullptr where the op reads fewer
  int64_t in_row_stride[2];
  const void* x;      // (n,)
  const void* y;      // (rows,)
  void* out;          // (rows, n), contiguous
  void* row_sums;     // (rows,)
  void* column_sums;  // (n,)
  float* scratch;     // plan_matrix_pass(params).scratch() values
  int64_t rows;
  int64_t n;
  DType dtype;
};

// `lanes` threads share a row; each takes `vectors` accesses of 16 bytes (or of one element) of
// `rows` rows at a time; of fewer where its registers hold two matrices or sums of columns too.
struct MatrixTile {
  int lanes;
  int vectors;
  int rows;
  bool vector;

  constexpr int elems(int elem_size) const { return vector ? 16 / elem_size : 1; }
  constexpr int width(int elem_size) const { return lanes * vectors * elems(elem_size); }
  constexpr int batch(int reads, bool column_sums) const {
    return reads == 2 ? rows / 2 : (column_sums ? rows * 3 / 4 : rows);
  }
};

// In the order of preference: the first that holds a row, else the last of its kind.
inline constexpr MatrixTile kMatrixTiles[] = {{1, 1, 8, true},  {8, 1, 4, true},
                                              {32, 1, 4, true}, {32, 2, 4, true},
                                              {4, 1, 8, false}, {32, 4, 4, false}};
inline constexpr int kNumMatrixTiles = sizeof(kMatrixTiles) / sizeof(kMatrixTiles[0]);

inline constexpr int kMatrixThreads = 256;
// Rows of one alignment are peeled where they are at least so many accesses long.
inline constexpr int kMinPeeledAccesses = 8;
// A block does so many batches of rows where that leaves enough blocks to fill a GPU.
inline constexpr int kMatrixBatches = 4;
inline constexpr int64_t kFullGrid = 1056;  // eight blocks for each SM of an H200
// Sums over columns: more blocks than this only add partial sums.
inline constexpr int64_t kColumnSumGrid = 1056;
inline constexpr int64_t kMaxColumnParts = 256;  // one block adds all of a column's parts
inline constexpr int64_t kMinRowsInChunk = 32;
inline constexpr int64_t kMaxStrip = 64;

// Rows whose starts have the same distance from a 16-byte boundary form a phase: rows phase,
// phase + phases, .... A block takes a strip of tiles of columns of a chunk of one phase's rows, so
// that a thread keeps its columns.
struct MatrixPlan {
  int tile;
  int phases;
  int shift;       // elements from a 16-byte boundary to row 0
  int shift_step;  // the same from row to row
  int groups;      // rows side by side in a block
  int64_t tiles;
  int64_t tiles_per_strip;
  int64_t strips;
  int64_t rows_per_chunk;  // of one phase
  int64_t chunks;
  bool row_sums;
  bool column_sums;
  int64_t rows;
  int64_t n;

  int64_t blocks() const { return strips * phases * chunks; }
  // Partial sums of a row and of a column. One is no part but the sum.
  int64_t row_parts() const { return strips; }
  int64_t column_parts() const { return phases * chunks; }
  int64_t row_scratch() const { return row_sums && row_parts() > 1 ? rows * row_parts() : 0; }
  int64_t column_scratch() const {
    return column_sums && column_parts() > 1 ? n * column_parts() : 0;
  }
  int64_t scratch() const { return row_scratch() + column_scratch(); }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How all matrices lie to the 16-byte boundaries. `vector` is false where they disagree.
struct MatrixAlignment {
  bool vector = true;
  int shift = 0;
  int shift_step = 0;

  MatrixAlignment(const MatrixPassParams& p, int elem_size) {
    const int elems = 16 / elem_size;
    bool first = true;
    const auto meet = [&](const void* base, int64_t row_stride) {
      if (base == nullptr) return;
      const int base_shift = static_cast<int>(reinterpret_cast<uintptr_t>(base) % 16) / elem_size;
      const int step = p.rows > 1 ? static_cast<int>(row_stride % elems) : 0;
      vector = vector && (first || (base_shift == shift && step == shift_step));
      shift = base_shift;
      shift_step = step;
      first = false;
    };
    meet(p.in[0], p.in_row_stride[0]);
    meet(p.in[1], p.in_row_stride[1]);
    meet(p.out, p.n);
    const bool whole = shift == 0 && shift_step == 0 && p.n % elems == 0;
    vector = vector && (whole || p.n >= kMinPeeledAccesses * elems);
    if (!vector) shift = shift_step = 0;
  }
};

inline int choose_matrix_tile(int64_t span, int elem_size, bool vector) {
  int chosen = -1;
  for (int i = 0; i < kNumMatrixTiles; ++i) {
    if (kMatrixTiles[i].vector != vector) continue;
    chosen = i;
    if (span <= kMatrixTiles[i].width(elem_size)) break;
  }
  return chosen;
}

// Sizes are at least 1.
inline MatrixPlan plan_matrix_pass(const MatrixPassParams& p) {
  const int elem_size = p.dtype == DType::kFloat32 ? 4 : 2;
  const MatrixAlignment alignment(p, elem_size);
  const int elems = alignment.vector ? 16 / elem_size : 1;

  MatrixPlan plan = {};
  plan.rows = p.rows;
  plan.n = p.n;
  plan.row_sums = p.row_sums != nullptr;
  plan.column_sums = p.column_sums != nullptr;
  plan.shift = alignment.shift;
  plan.shift_step = alignment.shift_step;
  plan.phases = elems / std::gcd(elems, alignment.shift_step);
  const int64_t span = p.n + (plan.phases > 1 ? elems - 1 : plan.shift);
  plan.tile = choose_matrix_tile(span, elem_size, alignment.vector);
  const MatrixTile& tile = kMatrixTiles[plan.tile];
  plan.tiles = divide_up(span, tile.width(elem_size));

  // No more groups than rows, but whole warps.
  const int64_t phase_rows = divide_up(p.rows, plan.phases);
  plan.groups = 32 / tile.lanes;
  while (plan.groups < phase_rows && plan.groups * tile.lanes < kMatrixThreads) plan.groups *= 2;
  const int reads = p.in[1] != nullptr ? 2 : 1;
  const int64_t batch = int64_t{plan.groups} * tile.batch(reads, plan.column_sums);

  const int64_t columns = plan.tiles * plan.phases;
  if (plan.column_sums) {
    const int64_t most = kMaxColumnParts / plan.phases;
    int64_t wanted = kColumnSumGrid / columns;
    wanted = wanted < most ? wanted : most;
    const int64_t share = divide_up(phase_rows, wanted > 1 ? wanted : 1);
    plan.rows_per_chunk = divide_up(share > kMinRowsInChunk ? share : kMinRowsInChunk, batch);
    plan.rows_per_chunk *= batch;
  } else {
    const bool many = columns * divide_up(phase_rows, kMatrixBatches * batch) >= kFullGrid;
    plan.rows_per_chunk = (many ? kMatrixBatches : 1) * batch;
  }
  plan.chunks = divide_up(phase_rows, plan.rows_per_chunk);

  // Few rows: a block does several tiles, and keeps the sums of its rows from tile to tile.
  plan.tiles_per_strip = 1;
  if (plan.chunks == 1 && phase_rows <= batch) {
    const int64_t full = kFullGrid * kMatrixThreads / (plan.groups * tile.lanes);
    plan.tiles_per_strip = columns / full;
    if (plan.tiles_per_strip > kMaxStrip) plan.tiles_per_strip = kMaxStrip;
    if (plan.tiles_per_strip < 1) plan.tiles_per_strip = 1;
  }
  plan.strips = divide_up(plan.tiles, plan.tiles_per_strip);
  return plan;
}

}  // namespace torchweld
