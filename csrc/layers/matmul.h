// The matmul engine for tensors. This is host code for CUDA builds only.
#pragma once

#include <utility>

#include "core/activation_kind.h"
#include "core/check.h"

namespace torchweld {

// Whether torch's settings allow fp32 matmuls to round their operands to TF32.
bool matmul_may_use_tf32(const Tensor& t);

// A matrix in the memory of a tensor, a batch of such matrices, or a pair. A pair is two matrices
// of the same shape and strides that act as one, with the second matrix appended along the rows or
// along the columns.
// NOTE: a tensor view could describe a matrix too, but creating it takes the host as long as a
// small op.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;
  int64_t batch = 1, batch_stride = 0;
  // Zeros fill the memory between the end of the contiguous dim and the next 16-byte boundary.
  bool zero_padded = false;
  // The dim along which a pair's second matrix is appended. `rows` and `columns` are the sizes of
  // one matrix of the pair.
  enum class Pair : int8_t { kNone, kRows, kColumns } pair = Pair::kNone;
  int64_t half_stride = 0;  // elements from a pair's first matrix to its second
  Tensor second = {};       // holds a pair's second matrix if that is not in `tensor`

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

  // Returns the halves (N, K) of weight (2N, K) as a pair. If interleaved, the halves are the even
  // and the odd rows, otherwise the first and the last N rows.
  static Matrix halves(const Tensor& weight, bool interleaved);
  // Returns left and right (N, K) as a pair. Copies them only if their strides differ or their
  // addresses are too far apart.
  static Matrix pair_of(const Tensor& left, const Tensor& right);

  bool empty() const { return batch * rows * columns == 0; }
  // The number of columns of the whole matrix, including those of a pair's second matrix.
  int64_t all_columns() const { return pair == Pair::kColumns ? 2 * columns : columns; }
  // Returns the transposed matrix.
  Matrix t() const {
    Matrix transposed = *this;
    std::swap(transposed.rows, transposed.columns);
    std::swap(transposed.row_stride, transposed.column_stride);
    if (pair != Pair::kNone) transposed.pair = pair == Pair::kRows ? Pair::kColumns : Pair::kRows;
    return transposed;
  }
  // Returns the matrix, or the first matrix of a pair, as a tensor (batch, rows, columns).
  Tensor view() const {
    return tensor.as_strided({batch, rows, columns}, {batch_stride, row_stride, column_stride});
  }
  // Returns the second matrix of a pair as a tensor (batch, rows, columns).
  Tensor second_view() const;
};

// Returns a tensor (..., n) as a matrix with n columns. Copies it only if its rows have no common
// stride.
Matrix rows_of(const Tensor& t);

struct MatmulEpilogue {
  OptionalTensor bias = std::nullopt;  // (N,), or (2N,) if gated; in the operands' dtype or fp32
  Activation activation = Activation::kNone;
  bool gated = false;  // if true, y (M, N) = gate(left, right) of z (M, 2N), and b is a pair
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // if true, left and right values alternate in bias and preact
  // If defined, receives z = a @ b^T + bias. Its rows are contiguous and its batch stride is y's.
  Tensor preact = {};
  Tensor dbias = {};  // if defined: may receive the sums of a's rows, (M,)
};

// The norm of a row: (x - mean) * rstd * (scale + scale_offset) + shift. For RMSNorm, the mean is
// 0.
struct RowNorm {
  bool centred;
  OptionalTensor scale = std::nullopt;  // (K,)
  OptionalTensor shift = std::nullopt;  // (K,)
  double scale_offset = 0;              // must be 0 without a scale
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

// Computes y = epilogue(a @ b.mT) with a (M, K), b (N, K) and y (M, N). All three may have a
// leading batch dim, and the batch of a or b may be 1. If b is a pair along its rows, its matrices
// are the two halves of a gated product. If b is a pair along its columns, K counts the columns of
// both matrices. Strides are arbitrary and sizes may be 0. Returns whether the kernel has written
// epilogue.dbias, the sums of a's rows. Only Hopper's kernels for the layout of a weight gradient
// compute these sums.
bool matmul_into(const Matrix& y, const Matrix& a, const Matrix& b,
                 const MatmulEpilogue& epilogue = {}, const MatmulNorm* norm = nullptr);

}  // namespace torchweld
