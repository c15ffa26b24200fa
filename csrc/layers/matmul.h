// The matmul engine for tensors. This is host code for CUDA builds only.
#pragma once

#include <utility>

#include "core/activation_kind.h"
#include "core/check.h"
#include "gemm/problem.h"

namespace torchweld {

// A matrix in the memory of a tensor. It may also be a batch of matrices, or a pair. A pair is two
// matrices with the same shape and strides that are used as one matrix. The rows of the second
// matrix follow the rows of the first (kRows), or the columns of the second follow the columns of
// the first (kColumns).
// NOTE: this is not a tensor view, because creating a view needs as much host time as a small op.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;
  int64_t batch = 1, batch_stride = 0;
  // Whether the memory from the end of the contiguous dim to the next 16-byte boundary is filled
  // with zeros.
  bool zero_padded = false;
  // The dim along which the two matrices of a pair follow one another. `rows` and `columns` are the
  // sizes of one of the two matrices.
  enum class Pair : int8_t { kNone, kRows, kColumns } pair = Pair::kNone;
  int64_t half_stride = 0;  // distance between a pair's two matrices, in elements
  Tensor second = {};       // a pair's second matrix, if it is not part of `tensor`

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

  // Returns the two halves (N, K) of weight (2N, K) as a pair. If interleaved, the left half is the
  // even rows and the right half is the odd rows. Otherwise the halves are the first and the last N
  // rows.
  static Matrix halves(const Tensor& weight, bool interleaved);
  // Returns `left` and `right`, both (N, K), as a pair. Copies them only if their strides differ or
  // if the distance of their addresses is not supported.
  static Matrix pair_of(const Tensor& left, const Tensor& right);

  bool empty() const { return batch * rows * columns == 0; }
  // The number of columns of the whole matrix, including the second matrix of a pair.
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

// Returns a tensor (..., n) as a matrix with n columns. Copies the tensor only if its rows have no
// common stride.
Matrix rows_of(const Tensor& t);

struct MatmulEpilogue {
  OptionalTensor bias = std::nullopt;  // (N,), or (2N,) if gated; in the operands' dtype or fp32
  Activation activation = Activation::kNone;
  // If true, b is a pair, and y (M, N) = gate(left, right), where left and right are the halves of
  // z = a @ b^T + bias (M, 2N).
  bool gated = false;
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // whether left and right values alternate in `bias` and `preact`
  // If defined, receives z = a @ b^T + bias. In memory, each row of z directly follows the previous
  // row. The batch stride of z is that of y.
  Tensor preact = {};
  Tensor dbias = {};  // (M,); if defined, may receive the sum of each row of a
};

// A norm of rows: (x - mean) * rstd * (scale + scale_offset) + shift. In RMSNorm, mean is 0.
struct RowNorm {
  bool centred;
  OptionalTensor scale = std::nullopt;  // has the shape (K,)
  OptionalTensor shift = std::nullopt;  // has the shape (K,)
  double scale_offset = 0;              // must be 0 without a scale
};

// The fp32 statistics of each row of a tensor (..., K). Their shape is (...). RMSNorm has no mean.
struct RowStatistics {
  OptionalTensor mean = std::nullopt;
  OptionalTensor rstd = std::nullopt;
};

// A norm that is applied to the rows of `a`, the first operand, before the product. If `out` has
// tensors, they receive the statistics of the rows.
struct MatmulNorm {
  RowNorm norm;
  double eps;
  RowStatistics out;
};

// Whether matmul_into can normalise the rows of a. It can if a has only few rows and the rows are
// short.
bool matmul_supports_norm(const Matrix& a, const Matrix& b);

// Computes y = epilogue(a @ b.mT) with a (M, K), b (N, K) and y (M, N). All three may have a
// leading batch dim, and the batch of a or b may be 1. If b is a pair of kind kRows, its matrices
// are the two halves of a gated product. If b is a pair of kind kColumns, K is the number of
// columns of both matrices together. Strides are arbitrary and sizes may be 0.
//
// Returns true if the kernel has written the sum of each row of a to epilogue.dbias. Only Hopper
// kernels compute these sums, and only the kernels for the layout of a weight gradient.
bool matmul_into(const Matrix& y, const Matrix& a, const Matrix& b,
                 const MatmulEpilogue& epilogue = {}, const MatmulNorm* norm = nullptr);

// The groups of grouped products. ends (E,) is int32 on the GPU: group e has the rows from
// ends[e - 1] (0 for the first group) to ends[e] - 1. The ends ascend and are at most R.
struct MatmulGroups {
  Tensor ends;
  // The list of tiles that the last product with groups of rows has written, and their rows.
  Tensor tiles = {};
  int64_t tile_rows = 0;
};

struct GemmParams;

// Sets p.groups for tiles of tile_rows rows. Allocates the memory of the list of tiles, unless an
// earlier product has written the same list.
void set_groups(GemmParams& p, MatmulGroups& groups, Grouped dim, int64_t tile_rows);

// Computes a grouped product.
//   kRows: y (R, N), a (R, K), b (E, N, K): y[r] = epilogue(a[r] @ b[e].T) for row r of group e.
//   The
//          bias is (E, N). Rows behind the last group are not written.
//   kK:    y (E, M, N), a (M, R), b (N, R): y[e] = the product over the columns of group e. There
//          is no epilogue. a and b must be column-major, and their memory must be padded
//          (zero_padded) or their columns be multiples of 16 bytes.
void grouped_matmul_into(const Matrix& y, const Matrix& a, const Matrix& b, MatmulGroups& groups,
                         Grouped dim, const MatmulEpilogue& epilogue = {});

// Computes y (M, N) = the sum of a[i] @ b[i] over all i, with a[i] (M, K_i) and b[i] (K_i, N). The
// sum is computed as one product whose K is concatenated. Hopper's 16-bit kernels read up to
// kMaxKSegments matrices in place. In all other cases the function concatenates the operands first.
void matmul_sum_into(const Matrix& y, at::TensorList a, at::TensorList b);

}  // namespace torchweld
