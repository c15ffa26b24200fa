// CPU. The three products of a loss over a chunk of rows, in the dtype of sums T whatever the
// operands' dtype is:
//   z (R, N) = x weight^T,   dx (R, K) = dz weight,   dweight (N, K) += dz^T x
//
// Each reads the weight once, in blocks that are converted to T and transposed where it needs that.
// The number and order of the sums don't depend on the number of threads.
#pragma once

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/check.h"
#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld {

// A row-major matrix in memory.
template <typename T>
struct MatrixView {
  T* data;
  int64_t stride;
};

// c (m, n) = a (m, k) @ b (k, n), added to c where `add`.
template <typename T>
void loss_tile(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, int64_t m, int64_t n,
               int64_t k, bool add) {
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

#ifdef CPUBLAS_BRGEMM_F32F32F32
inline bool has_brgemm() {
#ifdef TW_SIMD_TARGETS
  return simd_level() > 0 && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

inline void loss_tile(MatrixView<float> c, MatrixView<const float> a, MatrixView<const float> b,
                      int64_t m, int64_t n, int64_t k, bool add) {
  if (!has_brgemm()) return loss_tile<float>(c, a, b, m, n, k, add);
  at::native::cpublas::brgemm(m, n, k, a.stride, b.stride, c.stride, add, a.data, b.data, c.data,
                              /*is_vnni=*/false);
}
#endif

// NOTE: tiles of few sizes, because oneDNN compiles a kernel for each. A chain of more than 256
// additions would have a larger error, and b's tile stays in the cache.
template <typename T>
void loss_matmul(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, int64_t m,
                 int64_t n, int64_t k, bool add) {
  constexpr int64_t kM = 64, kN = 128, kK = 256;
  for (int64_t l = 0; l < k; l += kK) {
    for (int64_t j = 0; j < n; j += kN) {
      for (int64_t i = 0; i < m; i += kM) {
        const MatrixView<T> to = {c.data + i * c.stride + j, c.stride};
        const MatrixView<const T> left = {a.data + i * a.stride + l, a.stride};
        const MatrixView<const T> right = {b.data + l * b.stride + j, b.stride};
        loss_tile(to, left, right, std::min(kM, m - i), std::min(kN, n - j), std::min(kK, k - l),
                  add || l > 0);
      }
    }
  }
}

template <typename T>
MatrixView<T> view_of(const Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), t.stride(0)};
}
template <typename T>
MatrixView<const T> const_view_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0)};
}

// A copy of a matrix in the dtype of `like`, row-major.
inline Tensor copy_like(const Tensor& t, const Tensor& like) {
  return at::empty(t.sizes(), like.options()).copy_(t);
}

// z (R, N) = x (R, K) @ weight (N, K)^T; z and x contiguous, of T.
template <typename T>
void logits_into_cpu(const Tensor& z, const Tensor& x, const Tensor& weight) {
  constexpr int64_t kColumns = 128;
  const int64_t rows = x.size(0), n = weight.size(0), k = x.size(1);
  if (k == 0) z.zero_();
  parallel_tasks(k == 0 ? 0 : divide_up(n, kColumns), [&](int64_t task) {
    const int64_t first = task * kColumns, columns = std::min(kColumns, n - first);
    const Tensor block = copy_like(weight.narrow(0, first, columns).t(), x);
    loss_matmul<T>({view_of<T>(z).data + first, n}, const_view_of<T>(x), const_view_of<T>(block),
                   rows, columns, k, /*add=*/false);
  });
}

// dx (R, K) = dz (R, N) @ weight (N, K); dz contiguous. Slices of N are summed apart, then added.
template <typename T>
Tensor dx_cpu(const Tensor& dz, const Tensor& weight) {
  constexpr int64_t kMaxSlices = 16, kBlock = 256;
  const int64_t rows = dz.size(0), n = dz.size(1), k = weight.size(1);
  // Partial sums take at most an eighth of dz's memory.
  const int64_t slices = std::clamp<int64_t>(n / (8 * std::max<int64_t>(k, 1)), 1, kMaxSlices);
  const int64_t slice = divide_up(divide_up(n, slices), kBlock) * kBlock;
  const Tensor sums = at::empty({slices, rows, k}, dz.options());
  const bool reads_weight = weight.scalar_type() == dz.scalar_type() && weight.stride(1) == 1;
  parallel_tasks(slices, [&](int64_t task) {
    const Tensor sum = sums.select(0, task);
    const int64_t end = std::min(n, (task + 1) * slice);
    if (task * slice >= end) sum.zero_();
    for (int64_t first = task * slice; first < end; first += kBlock) {
      const int64_t size = std::min(kBlock, end - first);
      const Tensor rows_of_weight = weight.narrow(0, first, size);
      const Tensor block = reads_weight ? rows_of_weight : copy_like(rows_of_weight, dz);
      loss_matmul<T>(view_of<T>(sum), {const_view_of<T>(dz).data + first, n},
                     const_view_of<T>(block), rows, k, size, /*add=*/first > task * slice);
    }
  });
  return slices == 1 ? sums[0] : sums.sum(0);
}

// The gradients of weight and bias, summed over chunks in T.
template <typename T>
class ParameterGradients {
 public:
  // chunks: how many calls of add follow.
  ParameterGradients(const Tensor& dweight, const Tensor& dbias, const std::array<bool, 2>& wanted,
                     int64_t chunks, const at::TensorOptions& sums)
      : dweight_(dweight), dbias_(dbias), wanted_(wanted), chunks_(chunks) {
    if (wanted[1]) dbias_sum_ = at::zeros(dbias.sizes(), sums);
    if (!wanted[0]) return;
    const bool direct = dweight.scalar_type() == sums.dtype() && dweight.is_contiguous();
    if (direct || chunks == 0) {
      dweight_sum_ = dweight;
    } else if (chunks > 1) {
      dweight_sum_ = at::empty(dweight.sizes(), sums);
    }
    if (chunks == 0) dweight_sum_.zero_();
  }

  // dz (R, N) and x (R, K), contiguous.
  void add(const Tensor& dz, const Tensor& x) {
    if (!wanted_[0] && !wanted_[1]) return;
    constexpr int64_t kColumns = 128;
    const int64_t rows = dz.size(0), n = dz.size(1), k = x.size(1);
    parallel_tasks(divide_up(n, kColumns), [&](int64_t task) {
      const int64_t first = task * kColumns, columns = std::min(kColumns, n - first);
      const Tensor block = copy_like(dz.narrow(1, first, columns).t(), dz);
      if (wanted_[1]) dbias_sum_.narrow(0, first, columns).add_(block.sum(1));
      if (!wanted_[0] || k == 0) return;
      const bool in_place = dweight_sum_.defined();
      const Tensor out =
          in_place ? dweight_sum_.narrow(0, first, columns) : at::empty({columns, k}, dz.options());
      loss_matmul<T>(view_of<T>(out), const_view_of<T>(block), const_view_of<T>(x), columns, k,
                     rows, /*add=*/added_ > 0);
      if (!in_place) dweight_.narrow(0, first, columns).copy_(out);
    });
    ++added_;
  }

  void finish() {
    if (wanted_[1]) dbias_.copy_(dbias_sum_);
    if (dweight_sum_.defined() && !dweight_sum_.is_same(dweight_)) dweight_.copy_(dweight_sum_);
  }

 private:
  Tensor dweight_, dbias_, dweight_sum_, dbias_sum_;
  std::array<bool, 2> wanted_;
  int64_t chunks_, added_ = 0;
};

}  // namespace torchweld
