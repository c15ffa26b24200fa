// One pass over a (rows, n) matrix: the parameters of the kernels, what an op computes in a cell,
// and how the matrix is divided among blocks. This is pure host code that is tested without a GPU.
//
// An op is a functor on a Cell, with a MatrixPass that says what it reads and writes. The kernel
// may also call it for cells outside of the matrix. There `in` is zero, x is zero if the column
// does not exist, and y is zero if the row does not exist. For such a cell the op must add 0 to the
// sums of the row or column that exists, whatever the other value is.
#pragma once

#include <cstdint>
#include <numeric>

#include "core/dtype.h"
#include "core/index.h"
#include "core/macros.h"

namespace torchweld {

template <typename F>
struct Cell {
  F in[2];
  F x;  // the value of the column
  F y;  // the value of the row
  F out;
  F to_row, to_column;  // what the cell adds to the sum of its row and of its column
};

// What a pass reads and writes besides the matrices that it reads.
namespace pass {
enum Part : unsigned {
  row_values = 1,
  column_values = 2,
  writes = 4,
  row_sums = 8,
  column_sums = 16
};
}

template <int reads, unsigned parts>
struct MatrixPass {
  static constexpr int kReads = reads;  // number of matrices, 0 to 2
  static constexpr bool kRowValues = parts & pass::row_values;
  static constexpr bool kColumnValues = parts & pass::column_values;
  static constexpr bool kWrites = parts & pass::writes;
  static constexpr bool kRowSums = parts & pass::row_sums;
  static constexpr bool kColumnSums = parts & pass::column_sums;
};

struct MatrixPassParams {
  const void* in[2];  // (rows, n) with contiguous columns; nullptr if the op reads fewer
  int64_t in_row_stride[2];
  const void* x;      // (n,)
  const void* y;      // (rows,)
  void* out;          // (rows, n), contiguous
  void* row_sums;     // (rows,)
  void* column_sums;  // (n,)
  float* scratch;     // plan_matrix_pass(params).scratch() values
  int sms;            // the number of SMs; needed only for sums
  int64_t rows;
  int64_t n;
  DType dtype;
};

// How many rows a thread loads at a time, with one access per row. An access is 16 bytes (`rows`),
// or one element (`element_rows`) if the matrices are aligned differently to 16-byte boundaries.
struct MatrixTile {
  int rows;
  int element_rows;
  int blocks_per_sm;  // the register limit of the kernel allows this many

  constexpr int rows_of(bool vector) const { return vector ? rows : element_rows; }
};

// The index is the number of matrices that the op reads.
// NOTE: these tiles have 256 lanes along a row and few rows per thread, and the blocks run in
// memory order. The running blocks of an H200 then write one region of whole rows, close to the
// speed of a fill. Taller tiles with fewer lanes, and blocks that process many rows, are 3 to 10 %
// slower.
inline constexpr MatrixTile kMatrixTiles[] = {{8, 8, 4}, {4, 8, 4}, {2, 4, 4}};
// Two batches are in flight: one is loaded while the other is added up.
inline constexpr MatrixTile kColumnSumTile = {8, 8, 2};

constexpr MatrixTile matrix_tile(int reads, bool column_sums) {
  return column_sums ? kColumnSumTile : kMatrixTiles[reads];
}

// The tile of passes that only sum rows of 16-bit matrices. If a row is longer than a tile of
// kMatrixTiles, one block of up to `threads` threads processes the whole row, with `loads` accesses
// per thread at a time, and no partial sums are stored.
// NOTE: relative to the time that the memory needs, an H200 needs 1.007 to 1.021 at 2304 to 32768
// columns, instead of 1.04 to 1.26 with tiles. With few rows, such as (512, 4096), it needs 1.07
// instead of 1.37.
struct MatrixRowTile {
  int threads;
  int loads;
  int blocks_per_sm;  // the register limit of the kernel allows this many

  // The number of threads for a row of `accesses` accesses, with `loads` accesses per thread: whole
  // warps, at most `threads`.
  constexpr int threads_for(int64_t accesses) const {
    const int64_t wanted = ((accesses + loads - 1) / loads + 31) / 32 * 32;
    return wanted < threads ? static_cast<int>(wanted) : threads;
  }
  constexpr int64_t accesses() const { return int64_t{threads} * loads; }
};
inline constexpr MatrixRowTile kMatrixRowTile = {512, 4, 2};
// If a row has more accesses than a block loads at a time, whole rows are used only if there are at
// least this many rounds of blocks. With fewer rounds, most of the device would wait for the blocks
// of the last round. Relative to the memory's time, 8 rounds took 1.057 instead of 1.046 with
// tiles, and 31 rounds took 1.021 instead of 1.044. Nothing is measured in between.
inline constexpr int kMatrixRowRounds = 16;

inline constexpr int kMatrixThreads = 256;
// Rows that need not start on 16-byte boundaries are peeled only if they are at least this many
// accesses long.
inline constexpr int kMinPeeledAccesses = 8;

// `lanes` threads share a row, and a block has `groups` such groups of threads. A block processes a
// tile of `lanes` accesses along the rows, in a chunk of rows. If rows start anywhere, the accesses
// of a row start at its first 16-byte boundary, and the block of tile 0 also processes the elements
// before the first and behind the last access.
//
// If threads keep values or sums of columns, all rows of a block must have the same distance from
// the boundary. The rows phase, phase + phases, ... have the same distance and form a phase.
struct MatrixPlan {
  bool vector;
  bool whole_rows;  // a block processes a row: tiles is 1, rows_per_chunk 1
  bool peeled;      // some elements lie before the first or behind the last access of a row
  int elems;        // elements of an access
  int lanes;
  int groups;
  int phases;
  int shift;       // elements from a 16-byte boundary to row 0
  int shift_step;  // how much the shift grows from one row to the next
  int64_t tiles;
  int64_t rows_per_chunk;  // of one phase
  int64_t chunks;
  bool row_sums;
  bool column_sums;
  int64_t rows;
  int64_t n;

  int64_t blocks() const { return tiles * phases * chunks; }
  // The number of partial sums of a row and of a column. If it is 1, the block stores the sum
  // itself.
  TW_HOST_DEVICE int64_t row_parts() const { return tiles + peeled; }
  int64_t column_parts() const { return phases * chunks; }
  int64_t row_scratch() const { return row_sums && row_parts() > 1 ? rows * row_parts() : 0; }
  int64_t column_scratch() const {
    return column_sums && column_parts() > 1 ? n * column_parts() : 0;
  }
  int64_t scratch() const { return row_scratch() + column_scratch(); }

  // The number of elements of a row before its first access.
  TW_HOST_DEVICE int head(int64_t row) const {
    const int from_boundary = shift + static_cast<int>(row & (elems - 1)) * shift_step;
    return -from_boundary & (elems - 1);
  }
};

// How the matrices are aligned to 16-byte boundaries. `vector` is false if they are aligned
// differently.
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

// Returns the number of lanes of a row: the power of two that covers all accesses, or fewer lanes
// if that leaves far fewer of them idle.
inline int choose_matrix_lanes(int64_t accesses) {
  constexpr int kMin = 64;
  int lanes = 1;
  while (lanes < accesses && lanes < kMatrixThreads) lanes *= 2;
  const auto places = [=](int some) { return divide_up(accesses, some) * some; };
  for (int fewer = lanes / 2; fewer >= kMin; fewer /= 2) {
    if (places(fewer) * 5 <= places(lanes) * 4) lanes = fewer;
  }
  return lanes;
}

// Returns into how many chunks the batches of a phase are split. Of the numbers that fill whole
// rounds of blocks, this is the one with the shortest time, if the start and end of a block take as
// long as two batches.
inline int64_t choose_matrix_chunks(int64_t batches, int64_t columns, int64_t blocks_at_once) {
  constexpr int kStart = 2, kMaxRounds = 8;
  int64_t chosen = 1, least = -1;
  for (int64_t rounds = 1; rounds <= kMaxRounds; ++rounds) {
    int64_t chunks = blocks_at_once * rounds / columns;
    if (chunks > batches) chunks = batches;
    if (chunks < 1) chunks = 1;
    const int64_t time =
        divide_up(chunks * columns, blocks_at_once) * (divide_up(batches, chunks) + kStart);
    if (least >= 0 && time >= least) continue;
    least = time;
    chosen = chunks;
  }
  return chosen;
}

// Whether each block processes a whole row.
inline bool choose_whole_rows(const MatrixPassParams& p, const MatrixPlan& plan) {
  const bool sums_rows_alone = plan.row_sums && !plan.column_sums && p.x == nullptr;
  const int64_t accesses = p.n / plan.elems;
  if (!sums_rows_alone || p.dtype == DType::kFloat32 || !plan.vector || plan.peeled) return false;
  if (accesses <= kMatrixThreads) return false;  // one tile already covers the row
  const int64_t at_once = int64_t{kMatrixRowTile.blocks_per_sm} * (p.sms > 0 ? p.sms : 1);
  return accesses <= kMatrixRowTile.accesses() || p.rows >= kMatrixRowRounds * at_once;
}

// All sizes must be at least 1.
inline MatrixPlan plan_matrix_pass(const MatrixPassParams& p) {
  const int elem_size = p.dtype == DType::kFloat32 ? 4 : 2;
  const MatrixAlignment alignment(p, elem_size);

  MatrixPlan plan = {};
  plan.rows = p.rows;
  plan.n = p.n;
  plan.row_sums = p.row_sums != nullptr;
  plan.column_sums = p.column_sums != nullptr;
  plan.vector = alignment.vector;
  plan.elems = plan.vector ? 16 / elem_size : 1;
  plan.shift = alignment.shift;
  plan.shift_step = alignment.shift_step;
  plan.peeled = plan.shift != 0 || plan.shift_step != 0 || p.n % plan.elems != 0;
  const bool columns = plan.column_sums || p.x != nullptr;
  plan.phases = columns ? plan.elems / std::gcd(plan.elems, plan.shift_step) : 1;

  const int64_t accesses = p.n / plan.elems;
  plan.whole_rows = choose_whole_rows(p, plan);
  if (plan.whole_rows) {
    plan.lanes = kMatrixRowTile.threads_for(accesses);
    plan.groups = 1;
    plan.tiles = plan.rows_per_chunk = 1;
    plan.chunks = p.rows;
    return plan;
  }
  plan.lanes = choose_matrix_lanes(accesses);
  plan.tiles = divide_up(accesses, plan.lanes);
  // A block has at most as many groups as there are rows, but at least a whole warp.
  const int64_t phase_rows = divide_up(p.rows, plan.phases);
  plan.groups = plan.lanes < 32 ? 32 / plan.lanes : 1;
  while (plan.groups < phase_rows && plan.groups * plan.lanes < kMatrixThreads) plan.groups *= 2;

  const int reads = (p.in[0] != nullptr) + (p.in[1] != nullptr);
  const MatrixTile tile = matrix_tile(reads, plan.column_sums);
  const int64_t batch = int64_t{plan.groups} * tile.rows_of(plan.vector);
  const int64_t batches = divide_up(phase_rows, batch);
  int64_t chunks = batches;
  if (plan.column_sums) {
    const int64_t at_once = int64_t{tile.blocks_per_sm} * (p.sms > 0 ? p.sms : 1);
    chunks = choose_matrix_chunks(batches, plan.tiles * plan.phases, at_once);
  }
  plan.rows_per_chunk = divide_up(batches, chunks) * batch;
  plan.chunks = divide_up(phase_rows, plan.rows_per_chunk);
  return plan;
}

}  // namespace torchweld
