// Two kernels that make one pass over a (rows, n) matrix.
//
// column_pass_kernel also computes up to two sums for each column. A block processes a tile of
// columns and a chunk of rows. It processes 8 rows at a time, with one warp per row; each lane
// handles kElems contiguous columns. A warp loads several rows before it processes the first one,
// so that their loads are in flight together. The block stores its partial sums in scratch
// memory, whose layout is (chunk, sum, column). A second kernel (add_partials) adds up the chunks.
// Both kernels add in a fixed order, so the sums have the same bits in every run. For the gradient
// of gelu of (12608, 4096) in bf16 on an H200, 4 rows at once need 0.90 of the time of 2. Loads
// that start one iteration early gain nothing.
//
// element_pass_kernel computes no sums. It has one thread for every kElems columns of a row, in the
// order of memory. For gated_activation of (16384, 8192) in bf16 on an H100, it takes 0.82 of the
// time that blocks of column_pass_kernel take without sums, and its backward takes 0.94.
//
// An Op has the members kElems, kSums (0 if it computes no sums), kWrites and Sum. Its function
// load(row, column) loads kElems columns of a row, and add(row, column, loaded, sums) processes
// them. If kWrites is true, add also stores elements of a result.
#pragma once

#include "core/index.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "pointwise/column_split.h"

namespace torchweld {

constexpr int kRowGroups = 8;
constexpr int kColumnThreads = kRowGroups * kWarp;

// A running sum. If kKeepsRest is true, `rest` is the sum of the rounding errors of all additions,
// so that the sum of a long column stays accurate. kKeepsRest is true for fp32 results. A 16-bit
// result is too coarse to show the rounding errors.
template <bool kKeepsRest>
struct ColumnSum {
  float sum, rest;

  __device__ __forceinline__ void operator+=(float x) {
    const float before = sum;
    sum += x;
    if constexpr (kKeepsRest) {
      // Source: Knuth, TwoSum.
      const float added = sum - before;
      rest += (before - (sum - added)) + (x - added);
    }
  }
  // NOTE: if sum is inf, rest is NaN and must not be added.
  __device__ __forceinline__ float value() const {
    return kKeepsRest && isfinite(sum) ? sum + rest : sum;
  }
};

template <typename T>
using ColumnSumOf = ColumnSum<sizeof(T) == 4>;

// Runs the op without column sums. `vectors` is the number of groups of kElems columns in the
// matrix, and row_vectors is the number of such groups in a row.
template <typename Op>
__global__ __launch_bounds__(kColumnThreads, 4) void element_pass_kernel(const Op op,
                                                                         int64_t vectors,
                                                                         int64_t row_vectors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (i >= vectors) return;
  // A division in 64 bits takes several times as long.
  const int64_t row = vectors <= UINT32_MAX
                          ? static_cast<uint32_t>(i) / static_cast<uint32_t>(row_vectors)
                          : i / row_vectors;
  const int64_t column = (i - row * row_vectors) * Op::kElems;
  typename Op::Sum r_unused[Op::kSums > 0 ? Op::kSums : 1][Op::kElems] = {};
  op.add(row, column, op.load(row, column), r_unused);
}

template <typename Op>
__global__ __launch_bounds__(kColumnThreads,
                             3) void column_pass_kernel(const Op op, int64_t rows, int64_t n,
                                                        int64_t rows_per_chunk, float* g_partials) {
  constexpr int kElems = Op::kElems, kSums = Op::kSums;
  constexpr int kTile = kWarp * kElems;
  // More rows would spill registers.
  constexpr int kRowsAtOnce = kSums > 1 || sizeof(typename Op::Sum) > sizeof(float) ? 2 : 4;
  __shared__ float s_sums[kRowGroups][kSums][kTile];
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t column = first_column + threadIdx.x * kElems;
  const int64_t begin = blockIdx.y * rows_per_chunk;
  const int64_t end = begin + rows_per_chunk < rows ? begin + rows_per_chunk : rows;

  typename Op::Sum r_sums[kSums][kElems] = {};
  if (column < n) {
    for (int64_t first = begin + threadIdx.y; first < end; first += kRowsAtOnce * kRowGroups) {
      decltype(op.load(0, 0)) in[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t row = first + i * kRowGroups;
        in[i] = op.load(row < end ? row : first, column);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t row = first + i * kRowGroups;
        if (row < end) op.add(row, column, in[i], r_sums);
      }
    }
  }

#pragma unroll
  for (int s = 0; s < Op::kSums; ++s) {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      s_sums[threadIdx.y][s][threadIdx.x * kElems + j] = r_sums[s][j].value();
    }
  }
  __syncthreads();
  for (int i = threadIdx.y * kWarp + threadIdx.x; i < kSums * kTile; i += kColumnThreads) {
    const int s = i / kTile, c = i % kTile;
    if (first_column + c >= n) continue;
    float sum = 0.f;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) sum += s_sums[group][s][c];
    g_partials[(static_cast<int64_t>(blockIdx.y) * kSums + s) * n + first_column + c] = sum;
  }
}

// The addresses at which add_partials stores the sums. Column c of sum s is stored at
// to[s][c * stride].
struct ColumnSums {
  void* to[2];  // to[s] is nullptr if sum s is not requested
  int64_t stride;
};

// Launches the kernel that adds g_partials (chunks, num_sums, n) over the chunks. It may start
// while the kernel that writes g_partials still runs, and then waits until that kernel has ended
// (programmatic dependent launch).
template <typename T>
void launch_add_partials(const float* g_partials, int64_t chunks, int num_sums, int64_t n,
                         const ColumnSums& sums, cudaStream_t stream);

// Runs the op over all rows of the matrix. Also computes the column sums, unless g_partials is
// nullptr. g_partials may be nullptr only if the op writes a matrix.
template <typename T, typename Op>
void launch_column_pass(const Op& op, int64_t rows, int64_t n, float* g_partials,
                        const ColumnSums& sums, cudaStream_t stream) {
  if constexpr (Op::kWrites) {
    if (g_partials == nullptr) {
      const int64_t row_vectors = n / Op::kElems, vectors = rows * row_vectors;
      if (vectors == 0) return;
      launch_kernel(element_pass_kernel<Op>, {divide_up(vectors, kColumnThreads), kColumnThreads},
                    stream, op, vectors, row_vectors);
      return;
    }
  }
  if constexpr (Op::kSums > 0) {
    constexpr int kTile = kWarp * Op::kElems;
    const ColumnSplit split = split_rows(rows, n);
    Grid grid(divide_up(n, kTile), dim3(kWarp, kRowGroups));
    grid.blocks.y = static_cast<unsigned>(split.chunks);
    launch_kernel(column_pass_kernel<Op>, grid, stream, op, rows, n, split.rows_per_chunk,
                  g_partials);
    launch_add_partials<T>(g_partials, split.chunks, Op::kSums, n, sums, stream);
  }
}

}  // namespace torchweld
