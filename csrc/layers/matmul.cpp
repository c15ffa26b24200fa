// Runs a matmul of tensors on the matmul engine (gemm/gemm.h). The kernels read operands in 16-byte
// chunks. An operand is copied first if its K, its strides or its address are not multiples of 16
// bytes. Kernels that read such operands in place would need a variable copy size, which costs ten
// more instructions per chunk in every product.
#include "layers/matmul.h"

#ifdef TORCHWELD_CUDA

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "core/batch_invariance.h"
#include "core/choices.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "core/launch.h"
#include "core/linear_common.h"
#include "gemm/family.h"
#include "gemm/gemm.h"
#include "pointwise/pointwise.h"

namespace torchweld {
namespace {

// Returns the number of elements in a chunk of 16 bytes.
int64_t chunk_of(const Tensor& t) { return 16 / t.element_size(); }

// An operand (batch, rows, K) of the kernels. If the kernels don't support the strides of the given
// matrix, the operand is a K-major copy of it. The rows of the copy are padded with zeros to a
// multiple of 16 bytes.
struct Operand {
  Matrix matrix;
  bool k_major = true;

  // other_k_major says whether the other operand of the product is K-major. If other_k_major is
  // false, the kernels don't support a pair that is concatenated along K.
  explicit Operand(const Matrix& t, bool other_k_major = true) : matrix(t) {
    const int64_t rows = t.rows, k = t.columns, chunk = chunk_of(t.tensor);
    const bool base = reinterpret_cast<uintptr_t>(t.tensor.const_data_ptr()) % 16 == 0 &&
                      (t.batch == 1 || t.batch_stride % chunk == 0) && t.half_stride % chunk == 0;
    if (base && (k % chunk == 0 || t.zero_padded) && t.column_stride == 1 &&
        (rows == 1 || t.row_stride % chunk == 0) && t.pair != Pair::kColumns) {
      return;
    }
    // From an MN-major operand, the kernels load tiles with 8 rows and one k-block of columns. If
    // the operand is a pair, each such tile must lie in one of the two matrices.
    const int64_t k_block = kKBlockBytes / t.tensor.element_size();
    const bool whole = t.pair == Pair::kNone ? rows % chunk == 0 || t.zero_padded
                       : t.pair == Pair::kRows
                           ? rows % 8 == 0
                           : rows % chunk == 0 && k % k_block == 0 && other_k_major;
    if (base && whole && t.row_stride == 1 && (k == 1 || t.column_stride % chunk == 0)) {
      k_major = false;
      return;
    }
    matrix = t.pair == Pair::kRows ? copy_of_halves(t) : copy_of(t);
  }

  GemmOperand params(int64_t batch) const {
    // A dim with one element may have any stride, so the kernels receive 0 as its stride.
    const int64_t row_stride = k_major ? (matrix.rows == 1 ? 0 : matrix.row_stride) : 1;
    const int64_t k_stride = k_major ? 1 : (matrix.columns == 1 ? 0 : matrix.column_stride);
    const bool shared = batch == 1 || matrix.batch == 1;
    return {matrix.tensor.const_data_ptr(),
            row_stride,
            k_stride,
            shared ? 0 : matrix.batch_stride,
            matrix.half_stride,
            matrix.pair == Pair::kColumns ? matrix.columns : 0};
  }

 private:
  using Pair = Matrix::Pair;

  // Returns a K-major copy (batch, rows, columns). If t is a pair concatenated along K, the copy
  // holds the columns of both matrices.
  static Tensor copy_of(const Matrix& t) {
    const int64_t k = t.all_columns(), chunk = chunk_of(t.tensor);
    const int64_t width = (k + chunk - 1) / chunk * chunk;
    const Tensor copy = at::empty({t.batch, t.rows, width}, t.tensor.options());
    copy.narrow(2, 0, t.columns).copy_(t.view());
    if (k > t.columns) copy.narrow(2, t.columns, t.columns).copy_(t.second_view());
    if (width > k) copy.narrow(2, k, width - k).zero_();
    return copy;
  }

  // Returns a K-major copy of a pair of kind kRows. In the copy, the second matrix follows directly
  // after the first.
  static Matrix copy_of_halves(const Matrix& t) {
    const int64_t k = t.columns, chunk = chunk_of(t.tensor);
    const int64_t width = (k + chunk - 1) / chunk * chunk;
    const Tensor copy = at::empty({t.batch, 2, t.rows, width}, t.tensor.options());
    copy.select(1, 0).narrow(2, 0, k).copy_(t.view());
    copy.select(1, 1).narrow(2, 0, k).copy_(t.second_view());
    if (width > k) copy.narrow(3, k, width - k).zero_();
    return Matrix::halves(copy.view({t.batch, 2 * t.rows, width}), /*interleaved=*/false);
  }
};

// Returns the vector, or a copy of it if it is not contiguous or does not start on a 16-byte
// boundary.
OptionalTensor aligned_vector(const OptionalTensor& t) {
  if (!is_given(t)) return std::nullopt;
  const Tensor dense = t->contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0;
  return aligned ? dense : dense.clone();
}

}  // namespace

Matrix Matrix::halves(const Tensor& weight, bool interleaved) {
  Matrix m(weight);
  m.rows /= 2;
  m.pair = Pair::kRows;
  m.half_stride = interleaved ? m.row_stride : m.rows * m.row_stride;
  if (interleaved) m.row_stride *= 2;
  return m;
}

Matrix Matrix::pair_of(const Tensor& left, const Tensor& right) {
  // Strides in a tensor map must be smaller than kMaxBytes.
  constexpr intptr_t kMaxBytes = intptr_t{1} << 40;
  const auto address = [](const Tensor& t) {
    return reinterpret_cast<intptr_t>(const_data<char>(t));
  };
  const intptr_t bytes = address(right) - address(left), elem = left.element_size();
  if (left.strides() != right.strides() || bytes % elem != 0 || std::abs(bytes) >= kMaxBytes) {
    return halves(at::cat({left, right}), /*interleaved=*/false);
  }
  Matrix m(left);
  m.pair = Pair::kRows;
  m.half_stride = bytes / elem;
  m.second = right;
  return m;
}

Tensor Matrix::second_view() const {
  const Tensor& t = second.defined() ? second : tensor;
  const int64_t offset = t.storage_offset() + (second.defined() ? 0 : half_stride);
  return t.as_strided({batch, rows, columns}, {batch_stride, row_stride, column_stride}, offset);
}

Matrix rows_of(const Tensor& t) {
  const auto stride = row_stride_of(t);
  return stride ? Matrix(t, count_rows(t), *stride) : Matrix(as_matrix(t));
}

namespace {

// The matrices of a product with a concatenated K: a[i] is (M, K_i) and b[i] is (K_i, N).
struct Segments {
  at::TensorList a, b;

  // Whether the kernels can read the matrices in place.
  bool in_place() const {
    const auto aligned = [](const Tensor& t) {
      return t.stride(1) == 1 && (t.size(0) == 1 || t.stride(0) % chunk_of(t) == 0) &&
             reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
    };
    const int64_t k_block = kKBlockBytes / a[0].element_size();
    bool fits =
        a.size() <= kMaxKSegments && a[0].element_size() == 2 && b[0].size(1) % chunk_of(b[0]) == 0;
    for (size_t i = 0; fits && i < a.size(); ++i) {
      fits = a[i].size(1) > 0 && a[i].size(1) % k_block == 0 && aligned(a[i]) && aligned(b[i]);
    }
    return fits;
  }

  int64_t k() const {
    int64_t sum = 0;
    for (const Tensor& t : a) sum += t.size(1);
    return sum;
  }

  GemmSegments params() const {
    GemmSegments segments{static_cast<int>(a.size()), {}, {}, {}};
    for (size_t i = 0; i < a.size(); ++i) {
      segments.a[i] = Operand(a[i]).params(1);
      segments.b[i] = Operand(Matrix(b[i]).t()).params(1);
      segments.k[i] = a[i].size(1);
    }
    return segments;
  }
};

// Launches the product of matmul_into for a row-major y. If `segments` is given, K is the
// concatenation of all segments, and a and b are the operands of the first segment. If `groups` is
// given, the product is that of grouped_matmul_into.
bool launch_product(const Matrix& y, const Matrix& a, const Matrix& b,
                    const MatmulEpilogue& epilogue, const MatmulNorm* norm,
                    const Segments* segments = nullptr, MatmulGroups* groups = nullptr,
                    Grouped dim = Grouped::kNone);

}  // namespace

bool matmul_into(const Matrix& y, const Matrix& a, const Matrix& b, const MatmulEpilogue& epilogue,
                 const MatmulNorm* norm) {
  if (y.empty()) return false;
  const int64_t m = y.rows, n = y.columns;
  if (n > 1 && y.column_stride != 1) {
    // If y is column-major, the transposed product y^T = b @ a^T is computed, because y^T is
    // row-major. This is possible only without an epilogue and a norm: a bias, for example, would
    // be added along the wrong dim.
    const bool plain = !is_given(epilogue.bias) && epilogue.activation == Activation::kNone &&
                       !epilogue.gated && !epilogue.preact.defined() && norm == nullptr &&
                       b.pair == Matrix::Pair::kNone;
    if (plain && (m == 1 || y.row_stride == 1)) {
      matmul_into(y.t(), b, a);
      return false;
    }
    const Tensor dense = at::empty({y.batch, m, n}, y.tensor.options());
    const bool sums = matmul_into(dense, a, b, epilogue, norm);
    y.view().copy_(dense);
    return sums;
  }
  return launch_product(y, a, b, epilogue, norm);
}

void set_groups(GemmParams& p, MatmulGroups& groups, Grouped dim, int64_t tile_rows) {
  p.groups.dim = dim;
  p.groups.count = static_cast<int>(groups.ends.numel());
  p.groups.ends = const_data<int>(groups.ends);
  if (dim != Grouped::kRows) return;
  p.groups.has_tiles = groups.tile_rows == tile_rows;
  if (!p.groups.has_tiles) {
    constexpr int64_t kInts = sizeof(GroupTile) / sizeof(int);
    const int64_t tiles = max_group_tiles(p.m, p.groups.count, tile_rows);
    groups.tiles = at::empty({tiles * kInts}, groups.ends.options());
    groups.tile_rows = tile_rows;
  }
  p.groups.tiles = mutable_data<GroupTile>(groups.tiles);
}

void grouped_matmul_into(const Matrix& y, const Matrix& a, const Matrix& b, MatmulGroups& groups,
                         Grouped dim, const MatmulEpilogue& epilogue) {
  if (y.empty()) return;
  if (y.columns > 1 && y.column_stride != 1) {
    // A gradient of a weight may be column-major. Then its transpose is computed.
    if (dim == Grouped::kK && (y.rows == 1 || y.row_stride == 1)) {
      return grouped_matmul_into(y.t(), b, a, groups, dim);
    }
    const Tensor dense = at::empty({y.batch, y.rows, y.columns}, y.tensor.options());
    grouped_matmul_into(dim == Grouped::kK ? dense : dense.squeeze(0), a, b, groups, dim, epilogue);
    y.view().copy_(dense);
    return;
  }
  launch_product(y, a, b, epilogue, nullptr, nullptr, &groups, dim);
}

void matmul_sum_into(const Matrix& y, at::TensorList a, at::TensorList b) {
  if (y.empty()) return;
  const Segments segments = {a, b};
  if (a.size() > 1 && y.column_stride == 1 && segments.in_place()) {
    launch_product(y, a[0], Matrix(b[0]).t(), {}, nullptr, &segments);
  } else if (a.size() > 1) {
    matmul_into(y, at::cat(a, 1), Matrix(at::cat(b, 0)).t());
  } else {
    matmul_into(y, a[0], Matrix(b[0]).t());
  }
}

namespace {

bool launch_product(const Matrix& y, const Matrix& a, const Matrix& b,
                    const MatmulEpilogue& epilogue, const MatmulNorm* norm,
                    const Segments* segments, MatmulGroups* groups, Grouped dim) {
  const int64_t batch = y.batch, m = y.rows, n = y.columns;
  const Tensor& out = y.tensor;
  const Operand in_a(a), in_b(b, in_a.k_major);
  const Vector bias(epilogue.bias);
  GemmParams p{};
  p.m = m;
  p.n = n;
  p.k = segments != nullptr ? segments->k() : a.columns;
  p.batch = batch;
  p.a = in_a.params(batch);
  p.b = in_b.params(std::max(batch, b.batch));
  p.y = out.mutable_data_ptr();
  p.y_row_stride = y.row_stride;
  p.y_batch_stride = y.batch_stride;
  p.dtype = dtype_of(out);
  p.tf32 = matmul_may_use_tf32(out);
  p.epilogue.bias = bias.data();
  p.epilogue.bias_fp32 = is_given(epilogue.bias) && epilogue.bias->scalar_type() == at::kFloat;
  p.epilogue.activation = epilogue.activation;
  p.epilogue.gated = epilogue.gated;
  p.epilogue.gate = epilogue.gate;
  p.epilogue.interleaved = epilogue.interleaved;
  p.epilogue.preact = epilogue.preact.defined() ? mutable_data<void>(epilogue.preact) : nullptr;
  OptionalTensor scale, shift;
  if (norm != nullptr) {
    scale = aligned_vector(norm->norm.scale);
    shift = aligned_vector(norm->norm.shift);
    const auto out = [](const OptionalTensor& t) {
      return is_given(t) ? mutable_data<float>(*t) : nullptr;
    };
    p.norm.given = true;
    p.norm.centred = norm->norm.centred;
    p.norm.eps = static_cast<float>(norm->eps);
    p.norm.scale_offset = static_cast<float>(norm->norm.scale_offset);
    p.norm.scale = is_given(scale) ? const_data<void>(*scale) : nullptr;
    p.norm.shift = is_given(shift) ? const_data<void>(*shift) : nullptr;
    p.norm.mean = out(norm->out.mean);
    p.norm.rstd = out(norm->out.rstd);
  }
  const GemmProblem problem{m,
                            n,
                            p.k,
                            groups != nullptr ? groups->ends.numel() : batch,
                            epilogue.gated,
                            epilogue.gated || epilogue.activation != Activation::kNone,
                            gemm_math(p.dtype, p.tf32),
                            p.a.k_stride == 1,
                            p.b.k_stride == 1,
                            norm != nullptr,
                            device_facts(),
                            dim,
                            is_batch_invariant()};
  p.choice = pick<GemmFamily>(problem);
  TORCH_CHECK(p.choice.splits >= 0,
              "torchweld: no tile of the matmul engine supports a product of ", m, " x ", n, " x ",
              p.k, " in a batch of ", batch, "; cut it into smaller ones");
  GemmSegments matrices;
  Tensor whole_a, whole_b;
  if (segments != nullptr && p.choice.engine == GemmEngine::kSm90) {
    matrices = segments->params();
    p.segments = &matrices;
  } else if (segments != nullptr) {
    whole_a = at::cat(segments->a, 1);
    whole_b = at::cat(segments->b, 0);
    p.a = Operand(whole_a).params(1);
    p.b = Operand(Matrix(whole_b).t()).params(1);
  }
  Tensor workspace, flags, written, dbias_partials;
  if (groups != nullptr) {
    set_groups(p, *groups, dim, dim == Grouped::kRows ? group_tile_rows(p.choice) : 0);
  }
  if (const int64_t floats = p.choice.workspace_floats(problem); floats > 0) {
    workspace = p.choice.splits == kStreamK ? cached_floats(floats, out)
                                            : at::empty({floats}, out.options().dtype(at::kFloat));
    p.workspace = mutable_data<float>(workspace);
  }
  if (const int64_t count = p.choice.flags(problem); count > 0) {
    flags = block_flags(count, out);
    p.flags = mutable_data<uint64_t>(flags);
  }
  if (const int64_t bytes = gemm_written_bytes(p); bytes > 0) {
    written = at::empty({bytes}, out.options().dtype(at::kByte));
    p.written = written.mutable_data_ptr();
  }
  const bool wants_dbias = epilogue.dbias.defined() && !is_given(epilogue.bias);
  const int64_t partials = wants_dbias ? p.choice.dbias_partials(problem) : 0;
  if (partials > 0) {
    dbias_partials = at::empty({partials, m}, out.options().dtype(at::kFloat));
    p.dbias_partials = mutable_data<float>(dbias_partials);
  }
  launch_gemm(p, current_stream());
  if (partials == 0) return false;
  launch_partial_sums({p.dbias_partials, epilogue.dbias.mutable_data_ptr(), partials, m, p.dtype},
                      current_stream());
  return true;
}

}  // namespace

bool matmul_supports_norm(const Matrix& a, const Matrix& b) {
  if (a.column_stride != 1 || b.rows == 0 || is_batch_invariant()) return false;
  GemmProblem problem{};
  problem.m = a.rows;
  problem.n = b.rows;
  problem.k = a.columns;
  problem.batch = 1;
  problem.math = gemm_math(dtype_of(a.tensor), /*tf32=*/false);
  problem.a_k_major = problem.b_k_major = problem.normed = true;
  problem.device = device_facts();
  return std::any_of(std::begin(kRowsTiles), std::end(kRowsTiles),
                     [&](const RowsTile& tile) { return !rows_refusal(problem, tile, 1); });
}

}  // namespace torchweld

#endif
