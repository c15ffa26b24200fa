// The three matmuls of a loss on the CPU, for a chunk with R rows:
//   z (R, N) = x weight^T,   dx (R, K) = dz weight,   dweight (N, K) += dz^T x
// E is the element type of the operands, and T is the accumulation type. E may be bfloat16 if the
// CPU has bf16 dot products. Otherwise E is T.
//
// Each of the first two matmuls reads the weight once, block by block. A block of the weight is
// converted or transposed if necessary. The number and the order of the additions don't depend on
// the number of threads.
#pragma once

#include <ATen/ops/zeros.h>

#include <array>

#include "core/matmul_cpu.h"
#include "core/parallel.h"

namespace torchweld {

// Computes z (R, N) = x (R, K) @ weight (N, K)^T. z must be contiguous. x must be the result of
// left_operand.
template <typename E, typename T>
void logits_into_cpu(const Tensor& z, const Tensor& x, const Tensor& weight) {
  constexpr int64_t kColumns = 128;
  const int64_t rows = x.size(0), n = weight.size(0), k = weight.size(1);
  if (k == 0) z.zero_();
  parallel_tasks(k == 0 ? 0 : divide_up(n, kColumns), [&](int64_t task) {
    const int64_t first = task * kColumns, columns = std::min(kColumns, n - first);
    const RightOperand<E> block(weight.narrow(0, first, columns).t());
    tiled_matmul(view_of<T>(z).from(0, first), const_view_of<E>(x), block.view(), rows, columns,
                 whole_pairs<E>(k), /*add=*/false);
    release_tiles<E>();
  });
}

// Returns the largest power of two that is at most n; n must be at least 1.
inline int64_t floor_to_power_of_two(int64_t n) {
  int64_t power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// Computes dx (R, K) = dz (R, N) @ weight (N, K). If E is bf16, the rows of dz must be padded to an
// even number of elements. A task computes the partial sums of one range of N, for one range of the
// columns of dx or for all columns. At the end, the partial sums are added. Both N and the columns
// are divided into a power of two of ranges, so that threads get equal work.
template <typename E, typename T>
Tensor dx_cpu(const Tensor& dz, const Tensor& weight, const at::TensorOptions& options) {
  constexpr int64_t kMaxSlices = 16, kBlock = 256, kMinTasks = 4, kMinColumns = 64;
  const int64_t rows = dz.size(0), n = weight.size(0), k = weight.size(1);
  // The partial sums need at most an eighth of the memory of the logits.
  const int64_t slices =
      floor_to_power_of_two(std::clamp<int64_t>(n / (8 * std::max<int64_t>(k, 1)), 1, kMaxSlices));
  const int64_t slice = divide_up(divide_up(n, slices), kBlock) * kBlock;
  const int64_t parts = std::max<int64_t>(kMinTasks / slices, 1);
  const int64_t part_columns = divide_up(divide_up(k, parts), kMinColumns) * kMinColumns;
  const Tensor sums = at::empty({slices, rows, k}, options);
  parallel_tasks(slices * parts, [&](int64_t task) {
    const int64_t begin = task / parts * slice, end = std::min(n, begin + slice);
    const int64_t column = task % parts * part_columns,
                  columns = std::min(part_columns, k - column);
    if (columns <= 0) return;
    const Tensor sum = sums.select(0, task / parts).narrow(1, column, columns);
    if (begin >= end) sum.zero_();
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t size = std::min(kBlock, end - first);
      const RightOperand<E> block(weight.narrow(0, first, size).narrow(1, column, columns));
      tiled_matmul(view_of<T>(sum), const_view_of<E>(dz).from(0, first), block.view(), rows,
                   columns, whole_pairs<E>(size), /*add=*/first > begin);
    }
    release_tiles<E>();
  });
  return slices == 1 ? sums[0] : sums.sum(0);
}

// Accumulates the gradients of weight and bias over all chunks, in the type T.
template <typename E, typename T>
class ParameterGradients {
 public:
  // `chunks` is the number of chunks, which is the number of calls of add().
  ParameterGradients(const Tensor& dweight, const Tensor& dbias, const std::array<bool, 2>& wanted,
                     int64_t chunks, const at::TensorOptions& options)
      : dweight_(dweight), dbias_(dbias), wanted_(wanted), options_(options) {
    if (wanted[1]) dbias_sum_ = at::zeros(dbias.sizes(), options);
    if (!wanted[0]) return;
    const bool direct = dweight.scalar_type() == options.dtype() && dweight.is_contiguous();
    if (direct || chunks == 0) {
      dweight_sum_ = dweight;
    } else if (chunks > 1) {
      dweight_sum_ = at::empty(dweight.sizes(), options);
    }
    if (chunks == 0) dweight_sum_.zero_();
  }

  // Adds the gradients of one chunk. dz (R, N) is the gradient with respect to the chunk's logits,
  // and x (R, K) holds the chunk's rows of x.
  void add(const Tensor& dz, const Tensor& x) {
    if (!wanted_[0] && !wanted_[1]) return;
    constexpr int64_t kColumns = 128;
    const int64_t rows = dz.size(0), n = dz.size(1), k = x.size(1);
    const RightOperand<E> right(x);
    parallel_tasks(divide_up(n, kColumns), [&](int64_t task) {
      const int64_t first = task * kColumns, columns = std::min(kColumns, n - first);
      const Tensor block = left_operand<E>(dz.narrow(1, first, columns).t());
      if (wanted_[1]) {
        const auto dtype = options_.dtype().toScalarType();
        dbias_sum_.narrow(0, first, columns).add_(block.sum(1, /*keepdim=*/false, dtype));
      }
      if (!wanted_[0] || k == 0) return;
      const bool in_place = dweight_sum_.defined();
      const Tensor out =
          in_place ? dweight_sum_.narrow(0, first, columns) : at::empty({columns, k}, options_);
      tiled_matmul(view_of<T>(out), const_view_of<E>(block), right.view(), columns, k,
                   whole_pairs<E>(rows), /*add=*/added_ > 0);
      release_tiles<E>();
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
  at::TensorOptions options_;
  int64_t added_ = 0;
};

}  // namespace torchweld
