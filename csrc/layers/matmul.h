// The matmul engine for tensors. Host code of CUDA builds only.
#pragma once

#include <utility>

#include "core/activation_kind.h"
#include "core/check.h"

namespace torchweld {

// True where torch's settings let fp32 matmuls round their operands to TF32.
bool matmul_may_use_tf32(const Tensor& t);

// A matrix in a tensor's memory, or a batch of them.
// NOTE: views would say the same, but each costs the host as much time as a small op.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;
  int64_t batch = 1, batch_stride = 0;
  // Behind the adjacent dim, memory with zeros fills the last 16 bytes.
  bool zero_padded = false;

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

  bool empty() const { return batch * rows * columns == 0; }
  // The transposed matrix.
  Matrix t() const {
    Matrix transposed = *this;
    std::swap(transposed.rows, transposed.columns);
    std::swap(transposed.row_stride, transposed.column_stride);
    return transposed;
  }
  // The tensor (batch, rows, columns).
  Tensor view() const {
    return tensor.as_strided({batch, rows, columns}, {batch_stride, row_stride, column_stride});
  }
};

// The rows of a tensor (..., n) as a matrix; a copy only where no row stride describes them.
Matrix rows_of(const Tensor& t);

struct MatmulEpilogue {
  OptionalTensor bias = std::nullopt;  // (N,), (2N,) where gated; the operands' dtype, or fp32
  Activation activation = Activation::kNone;
  bool gated = false;  // y (M, N) = gate(left, right) of z (M, 2N)
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;
  // Where defined: receives z = a @ b^T + bias, contiguous but for y's batch stride.
  Tensor preact = {};
  Tensor dbias = {};  // where defined: may receive the sums of a's rows, (M,)
};

// A norm of a row: (x - mean) * rstd * scale + shift. RMSNorm has mean 0.
struct RowNorm {
  bool centred;
  OptionalTensor scale = std::nullopt;  // (K,)
  OptionalTensor shift = std::nullopt;  // (K,)
};

// Statistics of each row, fp32 (...); RMSNorm has no mean.
struct RowStatistics {
  OptionalTensor mean = std::nullopt;
  OptionalTensor rstd = std::nullopt;
};

// A norm of a's rows before the product. The tensors given in `out` receive the statistics.
struct MatmulNorm {
  RowNorm norm;
  double eps;
  RowStatistics out;
};

// Whether matmul_into supports a norm of a's rows: for few, short rows.
bool matmul_supports_norm(const Matrix& a, const Matrix& b);

// y = epilogue(a @ b.mT): a (M, K), b (N, K) or (2N, K), y (M, N); or all three with a batch dim
// first, where a and b may have a batch of 1. Strides are arbitrary and sizes may be 0. Returns
// whether it has written epilogue.dbias, the sums of a's rows: only Hopper's kernels for a weight's
// gradient compute them.
bool matmul_into(const Matrix& y, const Matrix& a, const Matrix& b,
                 const MatmulEpilogue& epilogue = {}, const MatmulNorm* norm = nullptr);

}  // namespace torchweld
