// The CPU version of a pass over a (rows, n) matrix. It computes the same cells as the GPU version
// (matrix_pass.h). It processes the matrix in blocks that fit in the cache.
//
// A task processes a strip of columns in a chunk of rows. It sums a few cells at a time in the
// working dtype and adds up these sums in fp64. At the end the partial sums of all tasks are added
// in a fixed order. The division into tasks depends only on the shape of the matrix, so the sums
// have the same bits with any number of threads.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "pointwise/matrix_pass.h"
#include "pointwise/matrix_tensors.h"

namespace torchweld {

struct MatrixPassCut {
  static constexpr int64_t kWidth = 4096;
  static constexpr int64_t kCells = 65536;  // the number of cells that one task processes at a time
  static constexpr int64_t kChunks = 64;    // the maximum number of chunks if columns are summed
  // The number of values that are added up in the working dtype. Their sum is then added to an fp64
  // sum. For a column sum, these are the values of kShortSums rows. For a row sum, these are
  // kShortSums values per lane.
  static constexpr int64_t kShortSums = 16;

  int64_t width, strips, block_rows, chunk_rows, chunks;

  MatrixPassCut(int64_t rows, int64_t n, bool column_sums) {
    width = std::min(n, kWidth);
    strips = divide_up(n, width);
    block_rows = std::min(rows, kCells / width);
    chunk_rows = column_sums ? std::max(block_rows, divide_up(rows, kChunks)) : block_rows;
    chunks = divide_up(rows, chunk_rows);
  }
};

// Processes one row of a strip and returns its sum.
template <typename A, typename F>
double matrix_row_cpu(const F& f, int64_t n, const A* __restrict__ in0, const A* __restrict__ in1,
                      const A* __restrict__ x, A y, A* __restrict__ out,
                      A* __restrict__ column_sums) {
  constexpr int kLanes = 16;
  const auto visit = [&](int64_t j, A& sum) {
    Cell<A> cell;
    if constexpr (F::kReads > 0) cell.in[0] = in0[j];
    if constexpr (F::kReads > 1) cell.in[1] = in1[j];
    if constexpr (F::kColumnValues) cell.x = x[j];
    cell.y = y;
    f(cell);
    if constexpr (F::kWrites) out[j] = cell.out;
    if constexpr (F::kRowSums) sum += cell.to_row;
    if constexpr (F::kColumnSums) column_sums[j] += cell.to_column;
  };
  double total = 0;
  int64_t j = 0;
  while (j < n) {
    A lanes[kLanes] = {};
    const int64_t end = std::min(n, j + kLanes * MatrixPassCut::kShortSums);
    for (; j + kLanes <= end; j += kLanes) {
      for (int l = 0; l < kLanes; ++l) visit(j + l, lanes[l]);
    }
    for (int l = 0; j < end; ++j, ++l) visit(j, lanes[l]);
    if constexpr (F::kRowSums) {
      for (const A lane : lanes) total += lane;
    }
  }
  return total;
}

// Returns a block of a matrix as a view. The function calls as_strided once instead of narrow
// twice, because two calls of narrow are slow relative to the work on a small block.
inline Tensor block_of(const Tensor& t, int64_t row, int64_t rows, int64_t column, int64_t width) {
  const int64_t offset = t.storage_offset() + row * t.stride(0) + column * t.stride(1);
  return t.as_strided({rows, width}, {t.stride(0), t.stride(1)}, offset);
}

// A matrix that a task reads or writes block by block. The task accesses the matrix in place, or
// through a buffer in the working dtype.
struct MatrixOperand {
  Tensor matrix, buffer;

  MatrixOperand(const Tensor& t, const MatrixPassCut& cut, at::ScalarType acc) : matrix(t) {
    const bool direct = t.scalar_type() == acc && (t.size(1) == 1 || t.stride(1) == 1);
    if (!direct) buffer = at::empty({cut.block_rows, cut.width}, t.options().dtype(acc));
  }

  Tensor place(int64_t row, int64_t rows, int64_t column, int64_t width) const {
    return block_of(matrix, row, rows, column, width);
  }
  Tensor memory(const Tensor& place) const {
    if (!buffer.defined()) return place;
    return block_of(buffer, 0, place.size(0), 0, place.size(1));
  }
};

// The work of a task: the columns of a strip, the rows of a chunk, and the addresses for the sums.
struct MatrixTask {
  int64_t first_row, end_row, column, width;
  double* row_sums;     // (rows,)
  double* column_sums;  // (width,)
};

template <typename A, typename F>
void matrix_task_cpu(const F& f, const MatrixPassTensors& t, const MatrixPassCut& cut,
                     const MatrixTask& task) {
  const at::ScalarType acc = c10::CppTypeToScalarType<A>::value;
  std::vector<MatrixOperand> in, out;
  for (int i = 0; i < F::kReads; ++i) in.emplace_back(t.in[i], cut, acc);
  if constexpr (F::kWrites) out.emplace_back(t.out, cut, acc);
  const A* x = F::kColumnValues ? t.x.template const_data_ptr<A>() + task.column : nullptr;
  const A* y = F::kRowValues ? t.y.template const_data_ptr<A>() : nullptr;
  std::vector<A> short_sums(F::kColumnSums ? task.width : 0);
  const auto keep_sums = [&] {
    for (size_t j = 0; j < short_sums.size(); ++j) {
      task.column_sums[j] += short_sums[j];
      short_sums[j] = 0;
    }
  };

  for (int64_t row = task.first_row; row < task.end_row; row += cut.block_rows) {
    const int64_t rows = std::min(cut.block_rows, task.end_row - row);
    const A* from[2] = {};
    int64_t from_stride[2] = {}, to_stride = 0;
    for (int i = 0; i < F::kReads; ++i) {
      const Tensor place = in[i].place(row, rows, task.column, task.width);
      const Tensor memory = in[i].memory(place);
      if (in[i].buffer.defined()) memory.copy_(place);
      from[i] = memory.template const_data_ptr<A>();
      from_stride[i] = memory.stride(0);
    }
    A* to = nullptr;
    Tensor place, memory;
    if constexpr (F::kWrites) {
      place = out[0].place(row, rows, task.column, task.width);
      memory = out[0].memory(place);
      to = memory.template mutable_data_ptr<A>();
      to_stride = memory.stride(0);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const double sum = matrix_row_cpu<A>(
          f, task.width, from[0] + r * from_stride[0], from[1] + r * from_stride[1], x,
          F::kRowValues ? y[row + r] : A(0), to + r * to_stride, short_sums.data());
      if constexpr (F::kRowSums) task.row_sums[row + r] = sum;
      if (F::kColumnSums && (r + 1) % MatrixPassCut::kShortSums == 0) keep_sums();
    }
    if constexpr (F::kColumnSums) keep_sums();
    if constexpr (F::kWrites) {
      if (out[0].buffer.defined()) place.copy_(memory);
    }
  }
}

// Computes sums (n,) = the sum of `parts` (parts, n) over the first dim. Overwrites `parts`.
inline void add_parts_cpu(const Tensor& sums, const Tensor& parts) {
  constexpr int64_t kBlock = 1024;
  const int64_t n = parts.size(1);
  double* const total = parts.mutable_data_ptr<double>();
  parallel_tasks(divide_up(n, kBlock), [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(n, begin + kBlock);
    for (int64_t part = 1; part < parts.size(0); ++part) {
      for (int64_t j = begin; j < end; ++j) total[j] += total[part * n + j];
    }
  });
  sums.copy_(parts[0]);
}

template <typename A, typename F>
void matrix_pass_of_dtype_cpu(const F& f, MatrixPassTensors t) {
  const Tensor& shape = F::kReads > 0 ? t.in[0] : t.out;
  const int64_t rows = shape.size(0), n = shape.size(1);
  const at::ScalarType acc = c10::CppTypeToScalarType<A>::value;
  if constexpr (F::kColumnValues) t.x = t.x.to(acc).contiguous();
  if constexpr (F::kRowValues) t.y = t.y.to(acc).contiguous();
  const MatrixPassCut cut(rows, n, F::kColumnSums);
  Tensor row_parts, column_parts;
  double *to_rows = nullptr, *to_columns = nullptr;
  if constexpr (F::kRowSums) {
    row_parts = at::empty({cut.strips, rows}, at::kDouble);
    to_rows = row_parts.mutable_data_ptr<double>();
  }
  if constexpr (F::kColumnSums) {
    column_parts = at::zeros({cut.chunks, n}, at::kDouble);
    to_columns = column_parts.mutable_data_ptr<double>();
  }
  parallel_tasks(cut.strips * cut.chunks, [&](int64_t task) {
    const int64_t chunk = task / cut.strips, strip = task % cut.strips;
    const int64_t row = chunk * cut.chunk_rows, column = strip * cut.width;
    matrix_task_cpu<A>(
        f, t, cut,
        {row, std::min(rows, row + cut.chunk_rows), column, std::min(cut.width, n - column),
         to_rows + strip * rows, to_columns + chunk * n + column});
  });
  if constexpr (F::kRowSums) add_parts_cpu(t.row_sums, row_parts);
  if constexpr (F::kColumnSums) add_parts_cpu(t.column_sums, column_parts);
}

// Computes z = relu(x * y) for (rows, n) tensors. The function calls two torch ops for one block at
// a time, so that the product stays in the cache.
inline void relu_product_cpu(const Tensor& z, const Tensor& x, const Tensor& y) {
  const int64_t rows = z.size(0), n = z.size(1);
  const MatrixPassCut cut(rows, n, /*column_sums=*/false);
  parallel_tasks(cut.strips * cut.chunks, [&](int64_t task) {
    const int64_t row = task / cut.strips * cut.chunk_rows, column = task % cut.strips * cut.width;
    const auto block = [&](const Tensor& t) {
      return block_of(t, row, std::min(cut.chunk_rows, rows - row), column,
                      std::min(cut.width, n - column));
    };
    Tensor part = block(z);
    at::mul_out(part, block(x), block(y));
    at::relu_(part);
  });
}

// Runs the pass on the CPU. All sizes of the matrix must be at least 1.
template <typename F>
void matrix_pass_cpu(const F& f, const MatrixPassTensors& t) {
  const Tensor& shape = F::kReads > 0 ? t.in[0] : t.out;
  acc_dtype(shape) == at::kDouble ? matrix_pass_of_dtype_cpu<double>(f, t)
                                  : matrix_pass_of_dtype_cpu<float>(f, t);
}

}  // namespace torchweld
