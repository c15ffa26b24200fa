// CPU loops over a row of logits. One loop computes the statistics of the row. Another loop
// replaces the logits by their gradient. The matmuls of the loss need about a hundred times as long
// as the two loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/simd_cpu.h"
#include "losses/rows.h"

namespace torchweld {

// Replaces a row of logits by z, the logits after softcap and temperature.
template <typename T>
void apply_scale(T* row, int64_t n, const LogitScale<T>& scale) {
  if (scale.identity()) return;
  with_vectors([&] {
    if (scale.softcap != T(0)) {
      const T cap = scale.softcap;
      for (int64_t j = 0; j < n; ++j) row[j] = cap * tanh_in_vectors(row[j] / cap);
    }
    if (scale.temperature != T(1)) {
      for (int64_t j = 0; j < n; ++j) row[j] /= scale.temperature;
    }
  });
}

// Adds the bias, if given, to a row of logits. Then replaces the logits by z, the logits after
// softcap and temperature, and returns max(z).
template <typename T>
T scale_row(T* row, const T* bias, int64_t n, const LogitScale<T>& scale) {
  if (bias != nullptr) {
    with_vectors([&] {
      for (int64_t j = 0; j < n; ++j) row[j] += bias[j];
    });
  }
  apply_scale(row, n, scale);
  T max = T(0);
  with_vectors([&] { max = max_of(row, n); });
  return max;
}

// Whether row_statistics also computes the mean (`mean`) and the expectation (`expectation`).
// row_statistics always computes the lse.
struct WantedStatistics {
  bool mean, expectation;
};

// Replaces a row of logits by z, as scale_row does, and returns the statistics of z.
// NOTE: the row is read once, in blocks of 2048 values. The sums within a block are relative to the
// largest value so far. The sums of the blocks are added in fp64. If all logits of a row were
// summed in fp32, the lse would lose one decimal digit.
template <typename T>
LogitStatistics<T> row_statistics(T* row, const T* bias, int64_t n, const LogitScale<T>& scale,
                                  int64_t target, const WantedStatistics& wanted) {
  constexpr int64_t kBlock = 2048;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  T max = -kInfinity;
  double sum = 0, mean = 0, expectation = 0;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = std::min(kBlock, n - first);
    T* const z = row + first;
    const T block_max = scale_row(z, bias == nullptr ? nullptr : bias + first, size, scale);
    if (block_max > max) {
      if (max != -kInfinity) {
        const double down = static_cast<double>(max) - block_max, factor = std::exp(down);
        expectation = factor == 0 ? 0 * sum : factor * (expectation + sum * down);
        sum *= factor;
        mean += static_cast<double>(first) * down;
      }
      max = block_max;
    }
    // If the maximum is -inf, subtract 0 instead, because -inf - (-inf) is NaN.
    const T shift = max == -kInfinity ? T(0) : max;
    with_vectors([&] {
      constexpr int kLanes = LaneSums<T>::kLanes;
      LaneSums<T> sums, means, expectations;
      const auto add = [&](int64_t j, int lane) {
        const T shifted = z[j] - shift, e = exp_in_vectors(shifted);
        sums.lanes[lane] += e;
        if (wanted.mean) means.lanes[lane] += shifted;
        if (wanted.expectation) expectations.lanes[lane] += e == T(0) ? T(0) : e * shifted;
      };
      int64_t j = 0;
      for (; j + kLanes <= size; j += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) add(j + lane, lane);
      }
      for (; j < size; ++j) add(j, 0);
      sum += sums.total();
      mean += means.total();
      expectation += expectations.total();
    });
  }
  return {max, static_cast<T>(std::log(sum)), row[target] - max,
          static_cast<T>(mean / static_cast<double>(n)), static_cast<T>(expectation / sum)};
}

// Replaces a row of z by the gradient with respect to the row's logits. The gradient is rounded to
// scalar_t, the dtype of the inputs, and stored as elements of type E. The first element is at the
// start of the row. E is scalar_t or T. If E is bf16 and n is odd, a zero follows the last element.
template <typename scalar_t, typename E, typename T>
void row_gradient(T* z, int64_t n, int64_t target, const RowGradient<T>& row,
                  const LogitScale<T>& scale) {
  const T z_target = z[target];
  with_vectors([&] {
    for (int64_t j = 0; j < n; ++j) {
      z[j] = row.of_logit(z[j], exp_in_vectors(z[j] - row.shift), scale);
    }
  });
  z[target] += row.target * scale.slope(z_target);
  if constexpr (!std::is_same_v<scalar_t, T>) {
    constexpr int64_t kBlock = 256;
    char* const out = reinterpret_cast<char*>(z);
    with_vectors([&] {
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t size = std::min(kBlock, n - first);
        E rounded[kBlock];
        for (int64_t j = 0; j < size; ++j) {
          rounded[j] = static_cast<E>(static_cast<scalar_t>(z[first + j]));
        }
        // NOTE: an E is not larger than a T. Therefore this store does not overwrite the gradients
        // of later blocks.
        std::memcpy(out + first * sizeof(E), rounded, size * sizeof(E));
      }
    });
    if (!std::is_same_v<E, T> && n % 2 != 0) std::memset(out + n * sizeof(E), 0, sizeof(E));
  }
}

}  // namespace torchweld
