// CPU: y = x @ W^T + bias for a few rows of x, as in decoding. The weight stays packed and is read
// once, 16 words at a time. A vector holds 16 codes: the same nibble of each of the 16 words. x is
// permuted to the order of these vectors. The products of a group are added up first, and then the
// group's scale multiplies the sum.
#pragma once

#include <ATen/ops/constant_pad_nd.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "int4/cpu/weight.h"

namespace torchweld {

constexpr int kInt4Lanes = 16;
constexpr int kInt4FewRows = 16;  // with more rows of x, dequantising the weight is faster

// With these offsets, a code is converted to a float without a conversion instruction or a shift.
// If nibble i of a word is or-ed into the mantissa of 2^23, the float is 2^23 + 16^i * code. Then
// kInt4Offsets.offset[zero][i] is subtracted, which leaves 16^i * (code - zero). x is divided by
// 16^i before the product.
constexpr int kInt4MantissaNibbles = 5;  // number of nibbles that fit into a mantissa

struct Int4Offsets {
  float offset[16][kInt4MantissaNibbles];
  constexpr Int4Offsets() : offset() {
    for (int zero = 0; zero < 16; ++zero) {
      for (int i = 0; i < kInt4MantissaNibbles; ++i)
        offset[zero][i] = float((1 << 23) + (zero << 4 * i));
    }
  }
};
inline constexpr Int4Offsets kInt4Offsets;

// Accumulators of the products of x with the codes of 16 words. There is one vector of accumulators
// per row of x.
// NOTE: the code uses vector extensions, because the compiler does not keep arrays of floats in
// registers.
template <int kRows>
struct Int4Sums {
  using Floats = float __attribute__((vector_size(4 * kInt4Lanes)));
  using Words = uint32_t __attribute__((vector_size(4 * kInt4Lanes)));
  Floats lanes[kRows];

  Int4Sums() { clear(std::make_index_sequence<kRows>()); }

  template <int kNibble>
  void add(const Words& words, int zero, const float* x) {
    const Words bits = (words & (15u << 4 * kNibble)) | 0x4B000000u;
    Floats values;
    std::memcpy(&values, &bits, sizeof(values));
    values -= kInt4Offsets.offset[zero][kNibble];
    add_products(values, x, std::make_index_sequence<kRows>());
  }

  // These functions use pack expansions instead of loops, because an array stays in registers only
  // if every index is a constant.
  template <size_t... r>
  void clear(std::index_sequence<r...>) {
    ((lanes[r] = Floats{}), ...);
  }

  template <size_t... r>
  void add_products(const Floats& values, const float* x, std::index_sequence<r...>) {
    Floats columns[kRows];
    (std::memcpy(&columns[r], x + r * kInt4Lanes, sizeof(Floats)), ...);
    ((lanes[r] += values * columns[r]), ...);
  }

  template <size_t... r>
  void add_scaled(const Int4Sums& other, float scale, std::index_sequence<r...>) {
    ((lanes[r] += scale * other.lanes[r]), ...);
  }
  void add_scaled(const Int4Sums& other, float scale) {
    add_scaled(other, scale, std::make_index_sequence<kRows>());
  }

  float total(int r) const {
    LaneSums<float> sum;
    std::memcpy(sum.lanes, &lanes[r], sizeof(sum.lanes));
    return sum.total();
  }
};

// Divides the values of vector v of x (..., vectors, rows, 16) by 16^nibbles[v].
inline Tensor int4_scale_nibbles(const Tensor& x, int64_t rows, const std::vector<int>& nibbles) {
  const Tensor divided = x.contiguous();
  float* data = divided.mutable_data_ptr<float>();
  for (int64_t v = 0; v < divided.numel() / kInt4Lanes; ++v) {
    const int nibble = nibbles[v / rows % int64_t(nibbles.size())];
    const float factor = 1.0f / float(1 << 4 * nibble);
    for (int l = 0; l < kInt4Lanes; ++l) data[v * kInt4Lanes + l] *= factor;
  }
  return divided;
}

// Adds the bias to the sums of a weight row and stores the results in a column of y. NOTE: the
// scales are converted to float before the product, so that the kernels need no instance per dtype
// of the scales. Such instances would add 1 MB of machine code, and 17 s to a build.
struct Int4Result {
  const float* scales;
  FloatWriter y;
  int64_t rows, n;
  std::optional<FloatReader> bias;
  int64_t bias_stride;

  template <int kRows>
  void store(int64_t row, const Int4Sums<kRows>& sums) const {
    const float shift = bias ? (*bias)[row * bias_stride] : 0.0f;
    for (int r = 0; r < rows; ++r) y.set(r * n + row, sums.total(r) + shift);
  }
};

// The product for the portable layout. A vector holds one code from each of 16 consecutive units of
// a row. All 16 codes have the same position within their units.
struct PortableInt4Rows {
  static constexpr int64_t kColumns = kInt4Lanes * kInt4Unit, kTaskRows = 64;
  static constexpr int64_t kMax16Bit = 8;  // with more rows, dequantisation and oneDNN are faster
  // The number of weight rows that are computed together, to reuse x in the cache.
  static constexpr int64_t kRowBlock = 4;
  const PortableInt4& weight;

  Tensor x_lanes(const Tensor& x) const {  // returns (K / 128, 8 vectors, rows, 16)
    return int4_scale_nibbles(x.view({x.size(0), -1, kInt4Lanes, kInt4Unit}).permute({1, 3, 0, 2}),
                              x.size(0), {0, 1, 2, 3, 4, 0, 1, 2});
  }

  template <int kRows>
  void run(const Int4Result& to, const float* x, int64_t task) const {
    constexpr int kVector = kInt4Lanes * kRows;
    const int64_t units = weight.shape.units();
    const int64_t group_units = weight.shape.group_units();
    const float* scales = to.scales;
    const int64_t end = std::min((task + 1) * kTaskRows, weight.shape.n);
    for (int64_t first = task * kTaskRows; first < end; first += kRowBlock) {
      const int64_t count = std::min(kRowBlock, end - first);
      Int4Sums<kRows> totals[kRowBlock];
      for (int64_t unit = 0, group = 0; unit < units; unit += kInt4Lanes) {
        if (unit == (group + 1) * group_units) ++group;
        const float* from = x + unit * kInt4Unit * kRows;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = first + i;
          typename Int4Sums<kRows>::Words words;
          std::memcpy(&words, weight.words(row, unit, kInt4Lanes, nullptr), sizeof(words));
          const int zero = weight.zero(row, group);
          Int4Sums<kRows> sums;
          sums.template add<0>(words, zero, from);
          sums.template add<1>(words, zero, from + kVector);
          sums.template add<2>(words, zero, from + 2 * kVector);
          sums.template add<3>(words, zero, from + 3 * kVector);
          sums.template add<4>(words, zero, from + 4 * kVector);
          words >>= 20;
          sums.template add<0>(words, zero, from + 5 * kVector);
          sums.template add<1>(words, zero, from + 6 * kVector);
          sums.template add<2>(words, zero, from + 7 * kVector);
          totals[i].add_scaled(sums, scales[weight.scale_at(row, group)]);
        }
      }
      for (int64_t i = 0; i < count; ++i) to.store(first + i, totals[i]);
    }
  }
};

// The product for the repacked layout. In a chunk, rows g and g + 8 of a tile share 16 words: four
// lanes t have four words each, one for each slice s. Nibble i of word 4 t + s belongs to row
// g + 8 * (i % 2) and column 16 s + 8 * (i / 2 % 2) + 2 t + i / 4.
struct RepackedInt4Rows {
  static constexpr int64_t kColumns = kInt4ChunkK, kTaskRows = kInt4TileRows;
  static constexpr int64_t kMax16Bit = kInt4FewRows;
  const RepackedInt4& weight;

  Tensor x_lanes(const Tensor& x) const {  // returns (chunks, 4 vectors, rows, 16)
    const Tensor padded =
        at::constant_pad_nd(x, {0, weight.shape.chunks() * kInt4ChunkK - x.size(1)});
    return int4_scale_nibbles(padded.view({x.size(0), -1, 4, 2, 4, 2}).permute({1, 5, 3, 0, 4, 2}),
                              x.size(0), {0, 2, 4, 0});
  }

  template <int kRows>
  void run(const Int4Result& to, const float* x, int64_t tile) const {
    constexpr int kVector = kInt4Lanes * kRows;
    const int64_t chunks = weight.shape.chunks();
    const int64_t group_columns = weight.shape.group_units() * kInt4Unit;
    const float* scales = to.scales;
    const auto* tile_words = weight.word_data + tile * chunks * kInt4ChunkWords;
    Int4Sums<kRows> totals[kInt4TileRows];
    for (int64_t chunk = 0, group = 0; chunk < chunks; ++chunk) {
      if (chunk * kInt4ChunkK == (group + 1) * group_columns) ++group;
      const float* from = x + chunk * kInt4ChunkK * kRows;
      for (int i = 0; i < kInt4TileRows; ++i) {
        const int64_t row = tile * kInt4TileRows + i;
        const int zero = weight.zero(row, group);
        typename Int4Sums<kRows>::Words words;
        std::memcpy(&words, tile_words + chunk * kInt4ChunkWords + i % 8 * kInt4Lanes,
                    sizeof(words));
        words >>= 4 * (i / 8);
        Int4Sums<kRows> sums;
        sums.template add<0>(words, zero, from);
        sums.template add<2>(words, zero, from + kVector);
        sums.template add<4>(words, zero, from + 2 * kVector);
        words >>= 24;
        sums.template add<0>(words, zero, from + 3 * kVector);
        totals[i].add_scaled(sums, scales[weight.scale_at(row, group)]);
      }
    }
    const int64_t rows = std::min<int64_t>(kInt4TileRows, weight.shape.n - tile * kInt4TileRows);
    for (int64_t i = 0; i < rows; ++i) to.store(tile * kInt4TileRows + i, totals[i]);
  }
};

template <typename Weight>
using Int4Rows =
    std::conditional_t<std::is_same_v<Weight, PortableInt4>, PortableInt4Rows, RepackedInt4Rows>;

// Returns the smallest power of two that is at least `rows`. The code is compiled only for numbers
// of rows that are powers of two.
inline int64_t int4_row_count(int64_t rows) {
  int64_t count = 1;
  while (count < rows) count *= 2;
  return count;
}

// Whether int4_rows_into supports the call. It requires few rows, a dtype other than double, and a
// group size that is a multiple of the number of columns in 16 words.
template <typename Weight>
bool supports_int4_rows(const Tensor& x, const Weight& weight) {
  const int64_t max_rows = x.element_size() == 2 ? Int4Rows<Weight>::kMax16Bit : kInt4FewRows;
  return x.size(0) <= max_rows && x.scalar_type() != at::kDouble &&
         weight.shape.group_units() * kInt4Unit % Int4Rows<Weight>::kColumns == 0;
}

// Computes y (rows, N) = x (rows, K) @ W^T + bias.
template <typename Weight>
void int4_rows_into(const Tensor& y, const Tensor& x, const Weight& weight,
                    const OptionalTensor& bias) {
  const int64_t n = weight.shape.n;
  const Int4Rows<Weight> by_rows = {weight};
  const int64_t rows = x.size(0), width = int4_row_count(rows);
  const Tensor padded = at::constant_pad_nd(x.to(at::kFloat), {0, 0, 0, width - rows});
  const Tensor x_lanes = by_rows.x_lanes(padded.contiguous());
  const Tensor scales = weight.scales.to(at::kFloat);
  Int4Result to = {scales.const_data_ptr<float>(), FloatWriter(y), rows, n, std::nullopt, 0};
  if (is_given(bias)) {
    to.bias = FloatReader(*bias);
    to.bias_stride = bias->stride(0);
  }
  const float* lanes = x_lanes.const_data_ptr<float>();
  parallel_tasks((n + by_rows.kTaskRows - 1) / by_rows.kTaskRows, [&](int64_t task) {
    with_vectors([&] {
      switch (width) {
        case 1:
          return by_rows.template run<1>(to, lanes, task);
        case 2:
          return by_rows.template run<2>(to, lanes, task);
        case 4:
          return by_rows.template run<4>(to, lanes, task);
        case 8:
          return by_rows.template run<8>(to, lanes, task);
        default:
          return by_rows.template run<16>(to, lanes, task);
      }
    });
  });
}

}  // namespace torchweld
