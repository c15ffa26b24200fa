// The description of one pass over a (rows, n) matrix. This header has the parameters of the
// kernels, the computation of a cell, and the plan that divides the matrix among blocks. It is pure
// host code, and tests run it without a GPU.
//
// An op is a functor that computes a Cell. Its base class MatrixPass says what the op reads and
// writes. The kernel may also call the op for cells outside of the matrix. In such a cell `in` is
// zero, x is zero if the column does not exist, and y is zero if the row does not exist. If only
// the row exists, the op must add 0 to the row's sum for any y. If only the column exists, the op
// must add 0 to the column's sum for any x.
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
  F to_row, to_column;  // the terms that the cell adds to the sums of its row and its column
};

// Flags for what a pass reads besides its input matrices, and flags for what it writes.
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
  static constexpr int kReads = reads;  // the number of input matrices, 0 to 2
  static constexpr bool kRowValues = parts & pass::row_values;
  static constexpr bool kColumnValues = parts & pass::column_values;
  static constexpr bool kWrites = parts & pass::writes;
  static constexpr bool kRowSums = parts & pass::row_sums;
  static constexpr bool kColumnSums = parts & pass::column_sums;
};

struct MatrixPassParams {
  const void* in[2];  // (rows, n) with stride 1 along a row; nullptr if not read
  int64_t in_row_stride[2];
  const void* x;      // (n,)
  const void* y;      // (rows,)
  void* out;          // (rows, n), contiguous
  void* row_sums;     // (rows,)
  void* column_sums;  // (n,)
  float* scratch;     // plan_matrix_pass(params).scratch() values
  int sms;            // the number of SMs; read only if there are sums
  int64_t rows;
  int64_t n;
  DType dtype;
};

// A thread loads `rows` rows at a time, with one access per row. The register limit of the kernel
// allows blocks_per_sm blocks per SM.
struct MatrixTile {
  int rows;
  int blocks_per_sm;
};

// Returns the tile of a pass that reads `reads` matrices. A pass with column sums holds two batches
// of rows: it loads one batch while it adds up the other.
// NOTE: without column sums, a tile has up to 256 lanes along a row and few rows, and the blocks
// run in memory order. Thus the blocks that run together on an H200 write one region of whole rows,
// nearly as fast as a fill. Two alternatives are 3 to 10 % slower: tiles with more rows and fewer
// lanes, and blocks that process many rows.
constexpr MatrixTile matrix_tile(int reads, bool column_sums) {
  return column_sums ? MatrixTile{8, 2} : MatrixTile{8 >> reads, 4};
}

inline constexpr int kMatrixThreads = 256;
// If rows don't start on 16-byte boundaries, the elements at both ends of a row are processed
// separately (peeled). Rows with fewer than kMinPeeledAccesses accesses are not peeled.
inline constexpr int kMinPeeledAccesses = 8;

// The division of a matrix among blocks. A group of `lanes` threads processes a row, and a block
// has `groups` such groups. A block processes one tile in a chunk of rows. A tile is `lanes`
// accesses wide. If rows don't start on 16-byte boundaries, the first access of a row is at the
// row's first 16-byte boundary. The block of tile 0 then also processes the elements before the
// first access and after the last access of each of its rows.
//
// If threads keep values or sums of columns in registers, an element of a column must have the same
// offset from a 16-byte boundary in all rows of a block. Rows i, i + phases, i + 2 phases, ... have
// the same offset. They form phase i, and a block processes rows of one phase only.
struct MatrixPlan {
  bool vector;
  bool peeled;  // whether rows have elements before the first or after the last access
  int elems;    // the number of elements in an access
  int lanes;
  int groups;
  int phases;
  int shift;       // the offset of row 0 from a 16-byte boundary, in elements
  int shift_step;  // the increase of a row's offset from one row to the next, in elements
  int64_t tiles;
  int64_t rows_per_chunk;  // the number of rows of one phase in a chunk
  int64_t chunks;
  bool row_sums;
  bool column_sums;
  int64_t rows;
  int64_t n;

  int64_t blocks() const { return tiles * phases * chunks; }
  // row_parts is the number of partial sums of a row. column_parts is the number of partial sums of
  // a column. If there is only one partial sum, it is the whole sum, and the block stores it as the
  // result.
  TW_HOST_DEVICE int64_t row_parts() const { return tiles + peeled; }
  TW_HOST_DEVICE int64_t column_parts() const { return phases * chunks; }
  TW_HOST_DEVICE int64_t row_scratch() const {
    return row_sums && row_parts() > 1 ? rows * row_parts() : 0;
  }
  int64_t column_scratch() const {
    return column_sums && column_parts() > 1 ? n * column_parts() : 0;
  }
  int64_t scratch() const { return row_scratch() + column_scratch(); }

  // Returns the number of elements of a row that precede its first access.
  TW_HOST_DEVICE int head(int64_t row) const {
    const int from_boundary = shift + static_cast<int>(row & (elems - 1)) * shift_step;
    return -from_boundary & (elems - 1);
  }
};

// Returns the number of lanes per row, a power of two. With that number, one tile covers all
// accesses of the row, unless this needs more than kMatrixThreads lanes. places(lanes) is the
// number of lanes in all tiles of a row, including lanes without an access. The function chooses
// fewer lanes if this reduces the number of places to 4/5 or less.
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

// Returns the number of chunks into which the batches of a phase are split. A round is the blocks
// that run at the same time. There is one candidate for each number of rounds from 1 to kMaxRounds:
// the number of chunks whose blocks fill these rounds. The function returns the candidate with the
// shortest modelled time. In the model, a block takes the time of its batches, plus the time of
// kStart batches for its start and its end.
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

// Plans a pass over a matrix. All sizes of the matrix must be at least 1.
inline MatrixPlan plan_matrix_pass(const MatrixPassParams& p) {
  const int elem_size = p.dtype == DType::kFloat32 ? 4 : 2, whole_elems = 16 / elem_size;
  MatrixPlan plan = {};
  plan.rows = p.rows;
  plan.n = p.n;
  plan.row_sums = p.row_sums != nullptr;
  plan.column_sums = p.column_sums != nullptr;

  // The kernel makes 16-byte accesses if all matrices have the same offsets from 16-byte
  // boundaries.
  plan.vector = true;
  bool first = true;
  const auto add_matrix = [&](const void* base, int64_t row_stride) {
    if (base == nullptr) return;
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(base) % 16) / elem_size;
    const int step = p.rows > 1 ? static_cast<int>(row_stride % whole_elems) : 0;
    plan.vector &= first || (shift == plan.shift && step == plan.shift_step);
    plan.shift = shift;
    plan.shift_step = step;
    first = false;
  };
  add_matrix(p.in[0], p.in_row_stride[0]);
  add_matrix(p.in[1], p.in_row_stride[1]);
  add_matrix(p.out, p.n);
  plan.peeled = plan.shift != 0 || plan.shift_step != 0 || p.n % whole_elems != 0;
  plan.vector &= !plan.peeled || p.n >= kMinPeeledAccesses * whole_elems;
  if (!plan.vector) plan.shift = plan.shift_step = plan.peeled = 0;
  plan.elems = plan.vector ? whole_elems : 1;
  const bool columns = plan.column_sums || p.x != nullptr;
  plan.phases = columns ? plan.elems / std::gcd(plan.elems, plan.shift_step) : 1;

  const int64_t accesses = p.n / plan.elems;
  plan.lanes = choose_matrix_lanes(accesses);
  plan.tiles = divide_up(accesses, plan.lanes);
  // A block has no more groups than its phase has rows, unless it needs more groups to fill a warp.
  const int64_t phase_rows = divide_up(p.rows, plan.phases);
  plan.groups = plan.lanes < 32 ? 32 / plan.lanes : 1;
  while (plan.groups < phase_rows && plan.groups * plan.lanes < kMatrixThreads) plan.groups *= 2;

  const int reads = (p.in[0] != nullptr) + (p.in[1] != nullptr);
  const MatrixTile tile = matrix_tile(reads, plan.column_sums);
  const int64_t batch = int64_t{plan.groups} * tile.rows;
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
