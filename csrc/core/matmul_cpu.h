// CPU matmuls in tiles that fit in the cache. The matmuls use oneDNN's kernels if these are
// available.
// NOTE: oneDNN compiles and caches a kernel for every new combination of m, n and k, so callers
// should use few combinations.
#pragma once

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/check.h"
#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "core/transpose_cpu.h"

namespace torchweld {

// A row-major matrix with a row stride.
template <typename T>
struct MatrixView {
  static constexpr int64_t kTileColumns = 128;
  T* data;
  int64_t stride;

  // Returns the submatrix that starts at (row, column).
  MatrixView from(int64_t row, int64_t column) const {
    return {data + row * stride + column, stride};
  }
};

// A bf16 matrix (k, n) that is stored in tiles of 64 columns. Within a tile, rows 2i and 2i + 1 are
// interleaved, so that the two elements of one column are adjacent. VNNI and AMX instructions need
// this layout. oneDNN accepts this layout for at most 64 columns. k must be even.
struct PairedView {
  static constexpr int64_t kTileColumns = 64;
  const c10::BFloat16* data;
  int64_t k;

  // Returns the submatrix that starts at (row, column). row must be even, column a multiple of 64.
  MatrixView<const c10::BFloat16> from(int64_t row, int64_t column) const {
    return {data + column * k + row * kTileColumns, kTileColumns};
  }
};

// Computes c (m, n) = a (m, k) @ b (k, n), or c += a @ b if `add` is true.
template <typename T>
void multiply_tile(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, int64_t m,
                   int64_t n, int64_t k, bool add) {
  with_vectors([&] {
    for (int64_t i = 0; i < m; ++i) {
      T* const row = c.data + i * c.stride;
      if (!add) std::fill_n(row, n, T(0));
      for (int64_t l = 0; l < k; ++l) {
        const T factor = a.data[i * a.stride + l];
        for (int64_t j = 0; j < n; ++j) row[j] += factor * b.data[l * b.stride + j];
      }
    }
  });
}

inline bool has_brgemm() {
#if defined(TW_SIMD_TARGETS) && defined(CPUBLAS_BRGEMM_F32F32F32)
  return simd_level() > 0 && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

// Returns true if the CPU can multiply bf16 tiles without a conversion to fp32.
inline bool has_bf16_brgemm() {
#if defined(TW_SIMD_TARGETS) && defined(CPUBLAS_BRGEMM_BF16BF16F32)
  static const bool supported = simd_level() == 2 && __builtin_cpu_supports("avx512bf16");
  return supported && has_brgemm();
#else
  return false;
#endif
}

// Returns true if the CPU can multiply a bf16 matrix with k columns by a PairedView.
inline bool multiplies_bf16(int64_t k) { return k % 2 == 0 && has_bf16_brgemm(); }

#ifdef CPUBLAS_BRGEMM_F32F32F32
inline void multiply_tile(MatrixView<float> c, MatrixView<const float> a, MatrixView<const float> b,
                          int64_t m, int64_t n, int64_t k, bool add) {
  if (!has_brgemm() || m * n * k == 0) return multiply_tile<float>(c, a, b, m, n, k, add);
  at::native::cpublas::brgemm(m, n, k, a.stride, b.stride, c.stride, add, a.data, b.data, c.data,
                              /*is_vnni=*/false);
}
#endif

#ifdef CPUBLAS_BRGEMM_BF16BF16F32
inline void multiply_tile(MatrixView<float> c, MatrixView<const c10::BFloat16> a,
                          MatrixView<const c10::BFloat16> b, int64_t m, int64_t n, int64_t k,
                          bool add) {
  if (m * n * k == 0) {
    for (int64_t i = 0; !add && i < m; ++i) std::fill_n(c.data + i * c.stride, n, 0.0f);
    return;
  }
  at::native::cpublas::brgemm(m, n, k, a.stride, b.stride, c.stride, add, a.data, b.data, c.data,
                              /*is_vnni=*/true);
}
#endif

// Releases the tile registers of AMX if E is bf16. A thread must call this function after its last
// matmul with operands of type E.
template <typename E>
void release_tiles() {
#ifdef CPUBLAS_BRGEMM_BF16BF16F32
  if (std::is_same_v<E, c10::BFloat16>) at::native::cpublas::brgemm_release();
#endif
}

// Computes c (m, n) = a (m, k) @ b (k, n), or c += a @ b if `add` is true. b is a MatrixView or a
// PairedView.
// NOTE: kK is only 256 for two reasons: a longer chain of fp32 additions has a larger error, and a
// tile of b must fit in the cache.
template <typename T, typename E, typename B>
void tiled_matmul(MatrixView<T> c, MatrixView<const E> a, const B& b, int64_t m, int64_t n,
                  int64_t k, bool add) {
  constexpr int64_t kM = 128, kN = B::kTileColumns, kK = 256;
  for (int64_t l = 0; l < k; l += kK) {
    for (int64_t j = 0; j < n; j += kN) {
      for (int64_t i = 0; i < m; i += kM) {
        multiply_tile(c.from(i, j), a.from(i, l), b.from(l, j), std::min(kM, m - i),
                      std::min(kN, n - j), std::min(kK, k - l), add || l > 0);
      }
    }
  }
}

// Computes c (m, n) = a (m, k) @ b (k, n) on one thread. If `add` is true, computes c += a @ b
// instead. b and c are contiguous. The rows of a are `a_stride` elements apart.
template <typename T>
void block_matmul(T* c, const T* a, const T* b, int64_t m, int64_t n, int64_t k, bool add,
                  int64_t a_stride) {
  // The rounding error of a chain of fp32 additions grows with the length of the chain. Therefore K
  // is split into blocks of at most kMaxChain elements, and the sums of the blocks are added.
  constexpr int64_t kMaxChain = 192;
  const int64_t blocks = std::max<int64_t>(1, divide_up(k, kMaxChain));
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = i * k / blocks, size = (i + 1) * k / blocks - first;
    multiply_tile(MatrixView<T>{c, n}, MatrixView<const T>{a + first, a_stride},
                  MatrixView<const T>{b + first * n, n}, m, n, size, add || i > 0);
  }
}
template <typename T>
void block_matmul(T* c, const T* a, const T* b, int64_t m, int64_t n, int64_t k, bool add) {
  block_matmul(c, a, b, m, n, k, add, /*a_stride=*/k);
}

template <typename T>
MatrixView<T> view_of(const Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), t.stride(0)};
}
template <typename T>
MatrixView<const T> const_view_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0)};
}

// Returns a (M, K) @ b (K, N) in the dtype of the accumulators, for the batch-invariant mode. A row
// has the same bits for every M. torch's matmul, in contrast, chooses its kernel by M.
inline Tensor invariant_product(const Tensor& a, const Tensor& b) {
  const auto multiply = [&](auto zero) {
    using T = decltype(zero);
    constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
    constexpr int64_t kRows = 128, kColumns = MatrixView<T>::kTileColumns;
    const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
    const Tensor left = a.to(dtype).contiguous(), right = b.to(dtype).contiguous();
    const Tensor product = at::zeros({m, n}, left.options());
    const int64_t columns = divide_up(n, kColumns);
    parallel_tasks(divide_up(m, kRows) * columns, [&](int64_t task) {
      const int64_t i = task / columns * kRows, j = task % columns * kColumns;
      tiled_matmul(view_of<T>(product).from(i, j), const_view_of<T>(left).from(i, 0),
                   const_view_of<T>(right).from(0, j), std::min(kRows, m - i),
                   std::min(kColumns, n - j), k, /*add=*/false);
    });
    return product;
  };
  return a.scalar_type() == at::kDouble ? multiply(double()) : multiply(float());
}

// Computes y (M, N) = x (M, K) @ weight (N, K).T + bias by invariant_product.
inline void invariant_linear_into(const Tensor& y, const Tensor& x, const Tensor& weight,
                                  const OptionalTensor& bias) {
  Tensor product = invariant_product(x, weight.t());
  if (is_given(bias)) product.add_(*bias);
  y.copy_(product);
}

// Returns the number of columns that the left operand of a matmul must have if the right operand
// has k rows. This number is k. If E is bf16, it is k rounded up to an even number, because the
// matmul reads bf16 columns in pairs.
template <typename E>
int64_t whole_pairs(int64_t k) {
  return std::is_same_v<E, c10::BFloat16> ? divide_up(k, 2) * 2 : k;
}

// Returns a row-major copy of t (m, k), for use as the left operand of a matmul. If E is bf16 and k
// is odd, a zero is added to each row of the copy, so that the row has an even number of elements.
template <typename E>
Tensor left_operand(const Tensor& t) {
  const int64_t k = t.size(1), width = whole_pairs<E>(k);
  const Tensor copy =
      at::empty({t.size(0), width}, t.options().dtype(c10::CppTypeToScalarType<E>()));
  if (std::is_same_v<E, c10::BFloat16> && t.scalar_type() == at::kBFloat16 && t.stride(0) == 1) {
    with_vectors([&] {
      transpose_halves(static_cast<uint16_t*>(copy.mutable_data_ptr()), width,
                       static_cast<const uint16_t*>(t.const_data_ptr()), t.stride(1), t.size(0), k);
    });
  } else {
    copy.narrow(1, 0, k).copy_(t);
  }
  if (width > k) copy.narrow(1, k, width - k).zero_();
  return copy;
}

// The right operand of a matmul: a matrix (k, n) with elements of type E.
template <typename E>
struct RightOperand {
  Tensor memory;

  // Uses t itself if it has elements of type E and stride 1 along the last dim. Otherwise copies t.
  explicit RightOperand(const Tensor& t)
      : memory(t.scalar_type() == c10::CppTypeToScalarType<E>() && t.stride(1) == 1
                   ? t
                   : left_operand<E>(t)) {}

  MatrixView<const E> view() const { return const_view_of<E>(memory); }
};

// Writes one tile of a PairedView. The source `from` has `rows` rows and `width` columns.
inline void pair_rows(uint16_t* to, const uint16_t* from, int64_t row_stride, int64_t column_stride,
                      int64_t rows, int64_t width) {
  constexpr int64_t kColumns = PairedView::kTileColumns;
  for (int64_t l = 0; l < rows; l += 2, to += 2 * kColumns) {
    const uint16_t* const first = from + l * row_stride;
    const uint16_t* const second = first + row_stride;
    if (l + 1 == rows) {
      for (int64_t i = 0; i < width; ++i) {
        to[2 * i] = first[i * column_stride];
        to[2 * i + 1] = 0;
      }
    } else if (column_stride == 1) {
      for (int64_t i = 0; i < width; ++i) {
        to[2 * i] = first[i];
        to[2 * i + 1] = second[i];
      }
    } else {
      for (int64_t i = 0; i < width; ++i) {
        to[2 * i] = first[i * column_stride];
        to[2 * i + 1] = second[i * column_stride];
      }
    }
  }
}

// Writes one tile of a PairedView. The elements of a column of the source `from` are adjacent in
// memory.
inline void pair_transposed(uint16_t* to, const uint16_t* from, int64_t column_stride, int64_t rows,
                            int64_t width) {
  constexpr int64_t kColumns = PairedView::kTileColumns;
  const int64_t pairs = rows / 2 * 2;
  transpose_pairs(to, 2 * kColumns, from, column_stride, pairs / 2, width);
  if (pairs < rows) {
    pair_rows(to + pairs * kColumns, from + pairs, 1, column_stride, 1, width);
  }
}

template <>
struct RightOperand<c10::BFloat16> {
  Tensor memory;
  int64_t k;

  explicit RightOperand(const Tensor& t) : k(whole_pairs<c10::BFloat16>(t.size(0))) {
    constexpr int64_t kColumns = PairedView::kTileColumns;
    const int64_t n = t.size(1), rows = t.size(0);
    memory = at::empty({divide_up(n, kColumns) * kColumns * k}, t.options());
    const int64_t row_stride = t.stride(0), column_stride = t.stride(1);
    const auto* from = static_cast<const uint16_t*>(t.const_data_ptr());
    auto* to = static_cast<uint16_t*>(memory.mutable_data_ptr());
    with_vectors([&] {
      for (int64_t j = 0; j < n; j += kColumns, to += k * kColumns) {
        const int64_t width = std::min(kColumns, n - j);
        const uint16_t* const tile = from + j * column_stride;
        if (width < kColumns) std::fill_n(to, k * kColumns, uint16_t{0});
        if (row_stride == 1) {
          pair_transposed(to, tile, column_stride, rows, width);
        } else {
          pair_rows(to, tile, row_stride, column_stride, rows, width);
        }
      }
    });
  }

  PairedView view() const {
    return {static_cast<const c10::BFloat16*>(memory.const_data_ptr()), k};
  }
};

}  // namespace torchweld
