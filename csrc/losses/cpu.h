// CPU loops over a row of logits. One loop computes the statistics of the row. Another loop
// replaces the logits by their gradient. The two loops need about a hundredth of the time of the
// loss's matmuls.
#pragma once

#include <algorithm>
#include <cstring>
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

// Whether row_statistics computes the mean and the expectation in addition to the lse.
struct WantedStatistics {
  bool mean, expectation;
};

// Computes the statistics of a row of z. `max` is the maximum of the row.
// NOTE: the row is summed in blocks of 2048 values, and the sums of the blocks are added in fp64.
// If the whole vocabulary were summed in fp32, the lse would lose one decimal digit.
template <typename T>
LogitStatistics<T> row_statistics(const T* z, int64_t n, T max, int64_t target,
                                  const WantedStatistics& wanted) {
  constexpr int64_t kBlock = 2048;
  double sum = 0, mean = 0, expectation = 0;
  with_vectors([&] {
    for (int64_t first = 0; first < n; first += kBlock) {
      constexpr int kLanes = LaneSums<T>::kLanes;
      LaneSums<T> sums, means, expectations;
      const auto add = [&](int64_t j, int lane) {
        const T shifted = z[j] - max, e = exp_in_vectors(shifted);
        sums.lanes[lane] += e;
        if (wanted.mean) means.lanes[lane] += shifted;
        if (wanted.expectation) expectations.lanes[lane] += e == T(0) ? T(0) : e * shifted;
      };
      const int64_t end = std::min(n, first + kBlock);
      int64_t j = first;
      for (; j + kLanes <= end; j += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) add(j + lane, lane);
      }
      for (; j < end; ++j) add(j, 0);
      sum += sums.total();
      mean += means.total();
      expectation += expectations.total();
    }
  });
  return {max, static_cast<T>(std::log(sum)), z[target] - max,
          static_cast<T>(mean / static_cast<double>(n)), static_cast<T>(expectation / sum)};
}

// Replaces a row of z by the gradient with respect to the row's logits. The gradient is rounded to
// scalar_t, the dtype of the inputs, and stored as elements of type E from the start of the row on.
// E is scalar_t or T. If E is bf16, a zero follows the last element of an odd number of elements.
template <typename scalar_t, typename E, typename T>
void row_gradient(T* z, int64_t n, int64_t target, const RowGradient<T>& row,
                  const LogitScale<T>& scale) {
  const T z_target = z[target];
  with_vectors([&] {
    for (int64_t j = 0; j < n; ++j) {
      z[j] = row.of_logit(z[j], exp_in_vectors(z[j] - row.lse), scale);
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
        // NOTE: an E is not larger than a T, so the block does not overwrite gradients after it.
        std::memcpy(out + first * sizeof(E), rounded, size * sizeof(E));
      }
    });
    if (!std::is_same_v<E, T> && n % 2 != 0) std::memset(out + n * sizeof(E), 0, sizeof(E));
  }
}

}  // namespace torchweld
