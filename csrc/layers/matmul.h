// The matmul engine for tensors. Host code for CUDA builds only.
#pragma once

#include <utility>

#include "core/activation_kind.h"
#include "core/check.h"

namespace torchweld {

// Whether torch's settings allow fp32 matmuls to round their operands to TF32.
bool matmul_may_use_tf32(const Tensor& t);

// A matrix in a tensor's memory, a batch of them, or a pair: two matrices of the same sizes and
// strides that act as one, the second one's rows or columns behind those of the first.
// NOTE: views would say the same, but each costs the host as much time as a small op.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;
  int64_t batch = 1, batch_stride = 0;
  // Zeros fill the memory between the end of the contiguous dim and the next 16-byte boundary.
  bool zero_padded = false;
  // Which dim of a pair has its matrices one after the other; the sizes are those of each.
  enum class Pair : int8_t { kNone, kRows, kColumns } pair = Pair::kNone;
  int64_t half_stride = 0;  // elements from the first matrix to the second
  Tensor second = {};       // the second one, where it is not in `tensor`

  // `t` is (rows, columns) or (batch, rows, columns).
  Matrix(const Tensor& t)
      : tensor(t),
        rows(t.size(-2)),
        columns(t.size(-1)),
        row_stride(t.stride(-2)),
        column_stride(t.stride(-1)) {
    if (t.dim() == 3) batch = t.size(0), batch_stride = t.stride(0);
  }
  Matrix(const Tensor& t, int64_t rows, int64_t row_stride)
      : tensor(t),
        rows(rows),
        columns(t.size(-1)),
        row_stride(row_stride),
        column_stride(t.stride(-1)) {}

  // The halves (N, K) of weight (2N, K), one after the other or alternating row by row.
  static Matrix halves(const Tensor& weight, bool interleaved);
  // left and right (N, K). Copies them only where one has other strides.
  static Matrix pair_of(const Tensor& left, const Tensor& right);

  bool empty() const { return batch * rows * columns == 0; }
  // Columns, of both matrices where a pair's are side by side.
  int64_t all_columns() const { return pair == Pair::kColumns ? 2 * columns : columns; }
  // The transposed matrix.
  Matrix t() const {
    Matrix transposed = *this;
    std::swap(transposed.rows, transposed.columns);
    std::swap(transposed.row_stride, transposed.column_stride);
    if (pair != Pair::kNone) transposed.pair = pair == Pair::kRows ? Pair::kColumns : Pair::kRows;
    return transposed;
  }
  // The tensor (batch, rows, columns), of a pair the first one.
  Tensor view() const {
    return tensor.as_strided({batch, rows, columns}, {batch_stride, row_stride, column_stride});
  }
  // The second one of a pair.
  Tensor second_view() const;
};

// Returns a tensor (..., n) as a matrix with n columns. Copies it only if its rows have no common
// stride.
Matrix rows_of(const Tensor& t);

struct MatmulEpilogue {
  OptionalTensor bias = std::nullopt;  // (N,), or (2N,) if gated; in the operands' dtype or fp32
  Activation activation = Activation::kNone;
  bool gated = false;  // y (M, N) = gate(left, right) of z (M, 2N); b is a pair
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // left and right values alternate in bias and preact
  // Where defined: receives z = a @ b^T + bias, contiguous but for y's batch stride.
  Tensor preact = {};
  Tensor dbias = {};  // if defined: may receive the sums of a's rows, (M,)
};

// A norm of a row: (x - mean) * rstd * (scale + scale_offset) + shift. RMSNorm has mean 0.
struct RowNorm {
  bool centred;
  OptionalTensor scale = std::nullopt;  // (K,)
  OptionalTensor shift = std::nullopt;  // (K,)
  double scale_offset = 0;              // 0 without a scale
};

// Statistics of each row in fp32, with shape (...). RMSNorm has no mean.
struct RowStatistics {
  OptionalTensor mean = std::nullopt;
  OptionalTensor rstd = std::nullopt;
};

// A norm of the rows of a before the product. The tensors in `out` that are given receive the
// statistics.
struct MatmulNorm {
  RowNorm norm;
  double eps;
  RowStatistics out;
};

// Whether matmul_into can normalise the rows of a: they must be few and short.
bool matmul_supports_norm(const Matrix& a, const Matrix& b);

// y = epilogue(a @ b.mT): a (M, K), b (N, K) or a pair, y (M, N); or all three with a batch dim
// first, where a and b may have a batch of 1. A pair's rows are the halves of a gated product; its
// columns are those of K, one matrix after the other. Strides are arbitrary and sizes may be 0.
// Returns whether it has written epilogue.dbias, the sums of a's rows: only Hopper's kernels for a
// weight's gradient compute them.
bool matmul_into(const Matrix& y, const Matrix& a, const Matrix& b,
                 const MatmulEpilogue& epilogue = {}, const MatmulNorm* norm = nullptr);

}  // namespace torchweld
