// The kernel that makes one pass over a (rows, n) matrix (matrix_pass.h). It computes each cell
// from three inputs: the elements of up to two matrices at the cell, one value of the row and one
// value of the column. It stores the cells, or sums them along rows or columns, or does both.
//
// A thread makes one 16-byte access in each of a few rows, and all these accesses are in flight
// together. A thread processes the same columns in all rows, so the values and the sums of its
// columns stay in registers. Row sums are first reduced over each warp. They are then reduced over
// the block through shared memory, for many rows at once. The sums of columns are reduced at the
// end of the block. Other kernels (matrix_kernels.cu, add_partials.cuh) add the partial sums of
// different blocks in a fixed order, so the sums have the same bits in every run.
#pragma once

#include "device/access.cuh"
#include "device/reduce.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/matrix_pass.h"

namespace torchweld {

struct MatrixArgs {
  MatrixPassParams params;
  MatrixPlan plan;
};

template <typename T, int kElems, typename F>
struct MatrixShared {
  static constexpr int kRows = matrix_tile(F::kReads, F::kColumnSums).rows;
  // The row sums of each warp, in the layout (batches, rows, warps of a row). The array has two
  // halves. One half is filled while the sums in the other half are added up.
  float rows[2][F::kRowSums ? kRows * kMatrixThreads : 1];
  // The column sums of each thread, in the layout (groups, lanes, elems).
  float columns[F::kColumnSums ? kMatrixThreads * kElems : 1];
};

__device__ __forceinline__ int log2_of(int power_of_two) { return __ffs(power_of_two) - 1; }

// The work of a block: one tile of columns, and some rows of one phase. Every plan.phases-th row
// belongs to the same phase. The indices of the block's rows within the phase are [begin, end).
//
// An access has kElems elements. If kEdges is true, the lanes process only the elements of a row
// that no 16-byte access covers. The first kWholeElems lanes process the elements before the first
// access. The other lanes process the elements after the last access, in backward order from the
// end of the row.
template <typename T, int kElems, typename F, bool kEdges = false>
struct MatrixWork {
  static constexpr int kRows = matrix_tile(F::kReads, F::kColumnSums).rows;
  static constexpr int kWholeElems = 16 / sizeof(T);
  // The number of row sums that each half of MatrixShared::rows can hold.
  static constexpr int kWaiting = kRows * kMatrixThreads;
  static constexpr bool kKeepsColumns = F::kColumnValues || F::kColumnSums;
  using Access = AccessOf<kElems>;

  // The values that a thread loads from a batch of rows. The thread loads rows `group`,
  // `group` + `groups`, `group` + 2 `groups`, ... of the batch.
  struct Batch {
    Access in[F::kReads > 0 ? F::kReads : 1][kRows];
    uint32_t y[kRows];
  };

  const MatrixPassParams& params;
  const MatrixPlan& plan;
  const F& f;
  float* s_rows;
  float* s_columns;
  int64_t tile, begin, end, part;  // `part` is the index of the block's partial column sums
  int phase;
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
  __device__ __forceinline__ MatrixWork(const MatrixArgs& args, const F& f, Shared& s)
      : params(args.params), plan(args.plan), f(f), s_rows(s.rows[0]), s_columns(s.columns) {
    const unsigned tiles = static_cast<unsigned>(plan.tiles);
    const int phase_bits = log2_of(plan.phases);
    tile = blockIdx.x % tiles;
    part = blockIdx.x / tiles;
    phase = static_cast<int>(part) & (plan.phases - 1);
    begin = (part >> phase_bits) * plan.rows_per_chunk;
    end = min(begin + plan.rows_per_chunk, (plan.rows - phase + plan.phases - 1) >> phase_bits);
    lanes = kEdges ? 2 * kWholeElems : plan.lanes;
    lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    group = static_cast<int>(threadIdx.x) >> log2_of(lanes);
    groups = static_cast<int>(blockDim.x) >> log2_of(lanes);
    batch = groups * kRows;
    column = column_of(lane);
    last_head =
        static_cast<int>(max(int64_t{-1}, min(int64_t{kWholeElems}, plan.n - kElems - column)));
    kept_head = plan.head(phase);
    waiting_from = begin;
  }

  __device__ __forceinline__ int64_t column_of(int of_lane) const {
    if constexpr (kEdges) {
      return of_lane < kWholeElems ? of_lane : plan.n - 1 - (of_lane - kWholeElems);
    }
    return (tile * lanes + of_lane) * kElems;
  }
  // Whether lane `of_lane` has an edge element of a row to process. An edge element is one that no
  // 16-byte access covers. `head` is the number of elements of the row before its first access.
  __device__ __forceinline__ bool has_edge(int of_lane, int head) const {
    const int tail = (static_cast<int>(plan.n) - head) & (kWholeElems - 1);
    return of_lane < kWholeElems ? of_lane < head : of_lane - kWholeElems < tail;
  }
  __device__ __forceinline__ bool has(int head) const {
    return kEdges ? has_edge(lane, head) : head <= last_head;
  }
  __device__ __forceinline__ int64_t row_of(int64_t k) const { return phase + plan.phases * k; }
  __device__ __forceinline__ int head_of(int64_t row) const {
    if constexpr (kKeepsColumns) return kept_head;
    return plan.head(row);
  }
  // Returns the number of elements by which the accesses of a row are shifted. `head` is the number
  // of elements of the row before its first access.
  __device__ __forceinline__ unsigned moved(int head) const { return kEdges ? 0 : head; }

  __device__ __forceinline__ void run() {
    if constexpr (F::kColumnValues) {
      const T* const g_x = static_cast<const T*>(params.x) + column + moved(kept_head);
      uint32_t r_bits[kElems];
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_bits[j] = load_bits_if(g_x + j, has(kept_head));
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_x[j] = float_of_bits<T>(r_bits[j]);
    }
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
    if constexpr (F::kColumnSums) store_columns();
  }

  // Returns the number of rows of the block in the batch that starts at row `base`, counted from
  // the thread's first row. The thread processes every groups-th of these rows.
  __device__ __forceinline__ int rows_left(int64_t base) const {
    return static_cast<int>(min(end - base, static_cast<int64_t>(batch))) - group;
  }

  __device__ __forceinline__ void load(Batch& to, int64_t base) const {
    const int left = rows_left(base);
    const int64_t first = row_of(base + group), step = groups * plan.phases;
    const T* g_in[2];
#pragma unroll
    for (int i = 0; i < F::kReads; ++i) {
      g_in[i] = static_cast<const T*>(params.in[i]) + first * params.in_row_stride[i] + column;
    }
    const T* g_y = static_cast<const T*>(params.y) + first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool row_holds = r * groups < left;
      const int head = head_of(first + r * step);
      const bool holds = row_holds && has(head);
#pragma unroll
      for (int i = 0; i < F::kReads; ++i) {
        to.in[i][r] = load_access_if<T, kElems>(g_in[i] + moved(head), holds);
        g_in[i] += step * params.in_row_stride[i];
      }
      if constexpr (F::kRowValues) to.y[r] = load_bits_if(g_y + r * step, row_holds);
    }
  }

  __device__ __forceinline__ void add(const Batch& from, int64_t base) {
    const int left = rows_left(base);
    const int64_t first = row_of(base + group), step = groups * plan.phases;
    T* g_out = F::kWrites ? static_cast<T*>(params.out) + first * plan.n + column : nullptr;
    // The rows of a batch are first added up without compensation, and only their sum is added to
    // the compensated column sum. An addition to a compensated sum needs six operations.
    float r_batch[kElems] = {}, r_rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Cell<float> cell;
      float r_in[2][kElems], r_out[kElems], sums[2] = {};
#pragma unroll
      for (int i = 0; i < F::kReads; ++i) access_floats<T, kElems>(r_in[i], from.in[i][r]);
      cell.y = F::kRowValues ? float_of_bits<T>(from.y[r]) : 0.f;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
#pragma unroll
        for (int i = 0; i < F::kReads; ++i) cell.in[i] = r_in[i][j];
        if constexpr (F::kColumnValues) cell.x = r_x[j];
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
        g_out += step * plan.n;
      }
    }
    if constexpr (F::kColumnSums) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_columns[j] += r_batch[j];
    }
    if constexpr (F::kRowSums) keep_rows(r_rows);
  }

  // Adds up the row sums over the lanes of each warp and stores the results in shared memory.
  // join_rows later reduces the results of several batches at once.
  __device__ __forceinline__ void keep_rows(float (&r_rows)[kRows]) {
    const int in_warp = min(lanes, kWarp);
#pragma unroll 1
    for (int step = in_warp / 2; step > 0; step /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) r_rows[r] += __shfl_xor_sync(~0u, r_rows[r], step);
    }
    const int thread = static_cast<int>(threadIdx.x);
    const int width = static_cast<int>(blockDim.x) / in_warp;
    if (thread % in_warp == 0) {
      float* const s_to = s_rows + half * kWaiting + waiting * width + thread / in_warp;
#pragma unroll
      for (int r = 0; r < kRows; ++r) s_to[r * width] = r_rows[r];
    }
    waiting += kRows;
    if (waiting * width == kWaiting) join_rows();
  }

  // Shared memory holds one sum for each row and warp. Adds up the sums of each row and stores the
  // result.
  __device__ __forceinline__ void join_rows() {
    // After this barrier, the other half of s_rows may be overwritten: all threads have read it
    // before they arrive here. Therefore two halves suffice.
    __syncthreads();
    const int warps = lanes <= kWarp ? 1 : lanes / kWarp, rows = waiting * groups;
    for (int i = threadIdx.x; i < rows && waiting_from + i < end; i += blockDim.x) {
      float sum = 0.f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += s_rows[half * kWaiting + i * warps + w];
      const int64_t row = row_of(waiting_from + i), parts = plan.row_parts();
      if (parts > 1) {
        params.scratch[row * parts + (kEdges ? plan.tiles : tile)] = sum;
      } else {
        static_cast<T*>(params.row_sums)[row] = from_float<T>(sum);
      }
    }
    waiting_from += rows;
    waiting = 0;
    half ^= 1;
  }

  // The thread groups of the block have summed different rows. Adds up their column sums.
  __device__ __forceinline__ void store_columns() {
#pragma unroll
    for (int j = 0; j < kElems; ++j) s_columns[threadIdx.x * kElems + j] = r_columns[j].value();
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * kElems; i += blockDim.x) {
      const int of_lane = i / kElems;
      const int64_t first = column_of(of_lane) + moved(kept_head), at = first + i % kElems;
      if (!(kEdges ? has_edge(of_lane, kept_head) : first + kElems <= plan.n)) continue;
      float sum = 0.f;
#pragma unroll 4
      for (int g = 0; g < groups; ++g) sum += s_columns[g * lanes * kElems + i];
      if (plan.column_parts() > 1) {
        params.scratch[plan.row_scratch() + part * plan.n + at] = sum;
      } else {
        static_cast<T*>(params.column_sums)[at] = from_float<T>(sum);
      }
    }
  }
};

template <typename T, int kElems, typename F>
__global__ __launch_bounds__(
    kMatrixThreads,
    matrix_tile(F::kReads, F::kColumnSums)
        .blocks_per_sm) void matrix_pass_kernel(const __grid_constant__ MatrixArgs args,
                                                const F f) {
  __shared__ MatrixShared<T, kElems, F> s;
  MatrixWork<T, kElems, F>(args, f, s).run();
  if constexpr (kElems > 1) {
    if (!args.plan.peeled || blockIdx.x % static_cast<unsigned>(args.plan.tiles) != 0) return;
    if constexpr (F::kRowSums || F::kColumnSums) __syncthreads();
    MatrixWork<T, 1, F, true>(args, f, s).run();
  }
}

}  // namespace torchweld
