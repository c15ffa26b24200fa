// The kernel that makes one pass over a (rows, n) matrix (matrix_pass.h). It computes each cell
// from three inputs: the elements of up to two matrices at the cell, one value of the row and one
// value of the column. It stores the cells, or sums them along rows or columns, or does both.
//
// A thread makes one 16-byte access in each of a few rows, and all these accesses are in flight
// together. A thread processes the same columns in all rows, so the values and the sums of its
// columns stay in registers. Row sums are first reduced over each warp. They are then reduced over
// the block through shared memory, for many rows at once. The sums of columns are reduced at the
// end of the block. The kernels of matrix_launch.cuh add the partial sums of different blocks in a
// fixed order, so the sums have the same bits in every run.
#pragma once

#include "device/access.cuh"
#include "device/reduce.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/matrix_pass.h"

namespace torchweld {

template <typename T>
struct MatrixArgs {
  const T* g_in[2];
  int64_t in_row_stride[2];
  const T* g_x;
  const T* g_y;
  T* g_out;
  T* g_row_sums;
  T* g_column_sums;
  float* g_row_parts;     // (rows, row_parts), or nullptr if a block computes whole row sums
  float* g_column_parts;  // (column_parts, n), or nullptr if a block computes whole column sums
  MatrixPlan plan;
};

// If kEdges is true, the lanes process only the elements of a row that no 16-byte access covers.
// The first kWholeElems lanes process the elements before the first access. The other lanes process
// the elements after the last access, in backward order from the end of the row.
template <typename T_, int kElems_, typename F, bool kEdges_ = false>
struct MatrixConfig {
  using T = T_;
  static constexpr int kElems = kElems_;  // the number of elements in an access
  static constexpr bool kEdges = kEdges_;
  static constexpr int kWholeElems = 16 / sizeof(T);
  static constexpr MatrixTile kTile = matrix_tile(F::kReads, F::kColumnSums);
  static constexpr int kRows = kTile.rows_of(kElems > 1 || kEdges);
  // The number of row sums that shared memory can hold. Each row has one such sum per warp.
  static constexpr int kWaiting = kRows * kMatrixThreads;
  static constexpr bool kKeepsColumns = F::kColumnValues || F::kColumnSums;
  using Edges = MatrixConfig<T, 1, F, true>;
};

template <typename Config, typename F>
struct MatrixShared {
  // The row sums of each warp, in the layout (batches, rows, warps of a row). The array has two
  // halves. One half is filled while the sums in the other half are added up.
  float rows[2][F::kRowSums ? Config::kWaiting : 1];
  // The column sums of each thread, in the layout (groups, lanes, elems).
  float columns[F::kColumnSums ? kMatrixThreads * Config::kElems : 1];
};

__device__ __forceinline__ int log2_of(int power_of_two) { return __ffs(power_of_two) - 1; }

// The work of a block: one tile of columns, and some rows of one phase. Every plan.phases-th row
// belongs to the same phase. The indices of the block's rows within the phase are [begin, end).
struct MatrixBlock {
  int64_t tile, begin, end, part;  // `part` is the index of the block's partial column sums
  int phase;

  __device__ __forceinline__ explicit MatrixBlock(const MatrixPlan& plan) {
    const unsigned tiles = static_cast<unsigned>(plan.tiles);
    tile = blockIdx.x % tiles;
    part = blockIdx.x / tiles;
    const int phase_bits = log2_of(plan.phases);
    phase = static_cast<int>(part) & (plan.phases - 1);
    begin = (part >> phase_bits) * plan.rows_per_chunk;
    end = min(begin + plan.rows_per_chunk, (plan.rows - phase + plan.phases - 1) >> phase_bits);
  }
};

template <typename Config, typename F>
struct MatrixWork {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  static constexpr int kRows = Config::kRows;
  static constexpr int kReads = F::kReads;
  static constexpr int kWholeElems = Config::kWholeElems;
  using Access = AccessOf<kElems>;

  // The values that a thread loads from a batch of rows. The thread loads rows `group`,
  // `group` + `groups`, `group` + 2 `groups`, ... of the batch.
  struct Batch {
    Access in[kReads > 0 ? kReads : 1][kRows];
    uint32_t y[kRows];
  };

  const MatrixArgs<T>& args;
  const F& f;
  const MatrixBlock& block;
  float* s_rows;
  float* s_columns;
  int lanes, lane, group, groups;
  int batch;             // the number of rows in a batch
  int64_t column;        // the column of the thread's access in a row whose head() is 0
  int last_head;         // the access lies within a row if the row's head is at most last_head
  int kept_head;         // if kKeepsColumns is true: the head of all rows of the block
  int64_t waiting_from;  // the first row whose sum is still in shared memory
  int waiting = 0;       // the number of rows per group whose sums are in shared memory
  int half = 0;
  float r_x[kElems];
  ColumnSumOf<T> r_columns[kElems] = {};

  template <typename Shared>
  __device__ __forceinline__ MatrixWork(const MatrixArgs<T>& args, const F& f,
                                        const MatrixBlock& block, Shared& s)
      : args(args),
        f(f),
        block(block),
        s_rows(s.rows[0]),
        s_columns(s.columns),
        lanes(Config::kEdges ? 2 * kWholeElems : args.plan.lanes),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        group(static_cast<int>(threadIdx.x) >> log2_of(lanes)),
        groups(static_cast<int>(blockDim.x) >> log2_of(lanes)),
        batch(groups * kRows),
        column(column_of(lane)),
        last_head(static_cast<int>(
            max(int64_t{-1}, min(int64_t{kWholeElems}, args.plan.n - kElems - column)))),
        kept_head(args.plan.head(block.phase)),
        waiting_from(block.begin) {}

  __device__ __forceinline__ int64_t column_of(int of_lane) const {
    if constexpr (Config::kEdges) {
      return of_lane < kWholeElems ? of_lane : args.plan.n - 1 - (of_lane - kWholeElems);
    }
    return (block.tile * lanes + of_lane) * kElems;
  }
  // Whether lane `of_lane` has an edge element of a row to process. An edge element is one that no
  // 16-byte access covers. `head` is the number of elements of the row before its first access.
  __device__ __forceinline__ bool has_edge(int of_lane, int head) const {
    const int tail = (static_cast<int>(args.plan.n) - head) & (kWholeElems - 1);
    return of_lane < kWholeElems ? of_lane < head : of_lane - kWholeElems < tail;
  }
  __device__ __forceinline__ bool has(int head) const {
    return Config::kEdges ? has_edge(lane, head) : head <= last_head;
  }
  __device__ __forceinline__ int64_t row_of(int64_t k) const {
    return block.phase + args.plan.phases * k;
  }
  __device__ __forceinline__ int head_of(int64_t row) const {
    if constexpr (Config::kKeepsColumns) return kept_head;
    return args.plan.head(row);
  }
  // Returns the number of elements by which the accesses of a row are shifted. `head` is the number
  // of elements of the row before its first access.
  __device__ __forceinline__ unsigned moved(int head) const { return Config::kEdges ? 0 : head; }

  __device__ __forceinline__ void run() {
    if constexpr (F::kColumnValues) load_columns();
    const int64_t begin = block.begin, end = block.end;
    if constexpr (F::kColumnSums) {
      Batch one, two;
      load(one, begin);
#pragma unroll 1
      for (int64_t base = begin; base < end; base += 2 * batch) {
        load(two, base + batch);
        add(one, base);
        if (base + batch >= end) break;
        load(one, base + 2 * batch);
        add(two, base + batch);
      }
    } else {
#pragma unroll 1
      for (int64_t base = begin; base < end; base += batch) {
        Batch one;
        load(one, base);
        add(one, base);
      }
    }
    if constexpr (F::kRowSums) join_rows();
    if constexpr (F::kColumnSums) leave_columns();
  }

  __device__ __forceinline__ void load_columns() {
    const T* const g_x = args.g_x + column + moved(kept_head);
    const bool holds = has(kept_head);
    if (reinterpret_cast<uintptr_t>(args.g_x + kept_head) % (kElems * sizeof(T)) == 0) {
      access_floats<T, kElems>(r_x, load_access_if<T, kElems>(g_x, holds));
    } else {
      uint32_t r_bits[kElems];
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_bits[j] = load_bits_if(g_x + j, holds);
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_x[j] = float_of_bits<T>(r_bits[j]);
    }
  }

  // Returns the number of rows of the block in the batch that starts at row `base`, counted from
  // the thread's first row. The thread processes every groups-th of these rows.
  __device__ __forceinline__ int rows_left(int64_t base) const {
    return static_cast<int>(min(block.end - base, static_cast<int64_t>(batch))) - group;
  }

  __device__ __forceinline__ void load(Batch& to, int64_t base) const {
    const int left = rows_left(base);
    const int64_t first = row_of(base + group), step = groups * args.plan.phases;
    const T* g_in[2];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      g_in[i] = args.g_in[i] + first * args.in_row_stride[i] + column;
    }
    const T* g_y = args.g_y + first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool row_holds = r * groups < left;
      const int head = head_of(first + r * step);
      const bool holds = row_holds && has(head);
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        to.in[i][r] = load_access_if<T, kElems>(g_in[i] + moved(head), holds);
        g_in[i] += step * args.in_row_stride[i];
      }
      if constexpr (F::kRowValues) to.y[r] = load_bits_if(g_y + r * step, row_holds);
    }
  }

  __device__ __forceinline__ void add(const Batch& from, int64_t base) {
    const int left = rows_left(base);
    const int64_t first = row_of(base + group), step = groups * args.plan.phases;
    T* g_out = F::kWrites ? args.g_out + first * args.plan.n + column : nullptr;
    // The rows of a batch are first added up without compensation, and only their sum is added to
    // the compensated column sum. An addition to a compensated sum needs six operations.
    float r_batch[kElems] = {}, r_rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float y = F::kRowValues ? float_of_bits<T>(from.y[r]) : 0.f;
      float r_in0[kElems], r_in1[kElems], r_out[kElems], sums[2] = {};
      if constexpr (kReads > 0) access_floats<T, kElems>(r_in0, from.in[0][r]);
      if constexpr (kReads > 1) access_floats<T, kElems>(r_in1, from.in[1][r]);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        Cell<float> cell;
        if constexpr (kReads > 0) cell.in[0] = r_in0[j];
        if constexpr (kReads > 1) cell.in[1] = r_in1[j];
        if constexpr (F::kColumnValues) cell.x = r_x[j];
        cell.y = y;
        f(cell);
        if constexpr (F::kRowSums) sums[j & 1] += cell.to_row;
        if constexpr (F::kColumnSums) r_batch[j] += cell.to_column;
        if constexpr (F::kWrites) r_out[j] = cell.out;
      }
      r_rows[r] = sums[0] + sums[1];
      if constexpr (F::kWrites) {
        const int head = head_of(first + r * step);
        const bool holds = r * groups < left && has(head);
        store_access_if<T, kElems>(g_out + moved(head), r_out, holds);
        g_out += step * args.plan.n;
      }
    }
    if constexpr (F::kColumnSums) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_columns[j] += r_batch[j];
    }
    if constexpr (F::kRowSums) leave_rows(r_rows);
  }

  // Adds up the row sums over the lanes of each warp and stores the results in shared memory.
  // join_rows later reduces the results of several batches at once.
  __device__ __forceinline__ void leave_rows(float (&r_rows)[kRows]) {
    const int in_warp = min(lanes, kWarp);
#pragma unroll 1
    for (int step = in_warp / 2; step > 0; step /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) r_rows[r] += __shfl_xor_sync(~0u, r_rows[r], step);
    }
    const int thread = static_cast<int>(threadIdx.x);
    const int width = static_cast<int>(blockDim.x) / in_warp;
    if (thread % in_warp == 0) {
      float* const s_to = s_rows + half * Config::kWaiting + waiting * width + thread / in_warp;
#pragma unroll
      for (int r = 0; r < kRows; ++r) s_to[r * width] = r_rows[r];
    }
    waiting += kRows;
    if (waiting * width == Config::kWaiting) join_rows();
  }

  // Shared memory holds one sum for each row and warp. Adds up the sums of each row and stores the
  // result.
  __device__ __forceinline__ void join_rows() {
    // After this barrier, the other half of s_rows may be overwritten: all threads have read it
    // before they arrive here. Therefore two halves suffice.
    __syncthreads();
    const int warps = lanes <= kWarp ? 1 : lanes / kWarp, rows = waiting * groups;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
      float sum = 0.f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += s_rows[half * Config::kWaiting + i * warps + w];
      leave_row(waiting_from + i, sum);
    }
    waiting_from += rows;
    waiting = 0;
    half ^= 1;
  }

  __device__ __forceinline__ void leave_row(int64_t k, float sum) const {
    if (k >= block.end) return;
    const int64_t row = row_of(k);
    if (args.g_row_parts != nullptr) {
      const int64_t part = Config::kEdges ? args.plan.tiles : block.tile;
      args.g_row_parts[row * args.plan.row_parts() + part] = sum;
    } else {
      args.g_row_sums[row] = from_float<T>(sum);
    }
  }

  // The thread groups of the block have summed different rows. Adds up their column sums.
  __device__ __forceinline__ void leave_columns() {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      s_columns[threadIdx.x * kElems + j] = r_columns[j].value();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * kElems; i += blockDim.x) {
      const int of_lane = i / kElems;
      const int64_t at = column_of(of_lane) + moved(kept_head) + i % kElems;
      const bool exists =
          Config::kEdges ? has_edge(of_lane, kept_head) : at - i % kElems + kElems <= args.plan.n;
      if (!exists) continue;
      float sum = 0.f;
#pragma unroll 4
      for (int g = 0; g < groups; ++g) sum += s_columns[g * lanes * kElems + i];
      if (args.g_column_parts != nullptr) {
        args.g_column_parts[block.part * args.plan.n + at] = sum;
      } else {
        args.g_column_sums[at] = from_float<T>(sum);
      }
    }
  }
};

template <typename Config, typename F>
__global__ __launch_bounds__(kMatrixThreads, Config::kTile.blocks_per_sm) void matrix_pass_kernel(
    const __grid_constant__ MatrixArgs<typename Config::T> args, const F f) {
  __shared__ MatrixShared<Config, F> s;
  const MatrixBlock block(args.plan);
  MatrixWork<Config, F>(args, f, block, s).run();
  if constexpr (Config::kElems > 1) {
    if (!args.plan.peeled || block.tile != 0) return;
    if constexpr (F::kRowSums || F::kColumnSums) __syncthreads();
    MatrixWork<typename Config::Edges, F>(args, f, block, s).run();
  }
}

}  // namespace torchweld
