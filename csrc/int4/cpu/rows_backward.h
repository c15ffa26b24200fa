// CPU: dx = dy @ W for a few rows of dy. As in the forward op (rows.h), the weight stays packed and
// is read once, 16 words at a time. A vector holds 16 codes: the same nibble of each of the 16
// words. The sums are in the order of these vectors and stay in the cache. Whenever a sum is
// loaded, the products of four rows of W are added to it.
#pragma once

#include <ATen/ops/zeros.h>

#include "int4/cpu/rows.h"

namespace torchweld {

constexpr int64_t kInt4FewGradientRows = 8;

// Holds 16 words of each of four rows of W. The products of the codes of row i with factors[i][j]
// are added to the sums of row j of dy.
// NOTE: there are no loops over arrays, for the reason given in Int4Sums.
template <int kRows>
struct Int4FourRows {
  using Floats = typename Int4Sums<kRows>::Floats;
  using Words = typename Int4Sums<kRows>::Words;
  static constexpr int64_t kRowBlock = 4;
  Words words[kRowBlock];
  const float* offsets[kRowBlock];
  float factors[kRowBlock][kRows];

  // Sets row i of the four rows. The factors of row i are scale * dy.
  void set(int i, const uint32_t* from, int zero, float scale, const float* dy) {
    std::memcpy(&words[i], from, sizeof(Words));
    offsets[i] = kInt4Offsets.offset[zero];
    for (int r = 0; r < kRows; ++r) factors[i][r] = scale * dy[r];
  }
  void clear(int i) {
    words[i] = Words{};
    offsets[i] = kInt4Offsets.offset[0];
    for (float& factor : factors[i]) factor = 0.0f;
  }
  void shift(int bits) {
    words[0] >>= bits, words[1] >>= bits, words[2] >>= bits, words[3] >>= bits;
  }

  // Adds the products of the codes in nibble kNibble of the words to sums (rows, 16). Each product
  // is multiplied by 16^kNibble.
  template <int kNibble>
  void add(float* sums) const {
    add_rows<kNibble>(sums, std::make_index_sequence<kRows>());
  }

 private:
  template <int kNibble, size_t... r>
  void add_rows(float* to, std::index_sequence<r...> rows) const {
    Floats sums[kRows];
    (std::memcpy(&sums[r], to + r * kInt4Lanes, sizeof(Floats)), ...);
    add_row<kNibble, 0>(sums, rows);
    add_row<kNibble, 1>(sums, rows);
    add_row<kNibble, 2>(sums, rows);
    add_row<kNibble, 3>(sums, rows);
    (std::memcpy(to + r * kInt4Lanes, &sums[r], sizeof(Floats)), ...);
  }
  template <int kNibble, int i, size_t... r>
  void add_row(Floats (&sums)[kRows], std::index_sequence<r...>) const {
    const Words bits = (words[i] & (15u << 4 * kNibble)) | 0x4B000000u;
    Floats values;
    std::memcpy(&values, &bits, sizeof(values));
    values -= offsets[i][kNibble];
    ((sums[r] += values * factors[i][r]), ...);
  }
};

// The access to a weight in the portable layout. words() returns the words of a row in a block of
// columns. add() adds products to `sums`, which is (kVectors, rows of dy, kInt4Lanes). Vector v of
// `sums` belongs to the codes at position v of their words. columns() reorders the sums to columns
// of dx.
struct PortableInt4Columns {
  static constexpr int64_t kColumns = PortableInt4Rows::kColumns, kVectors = 8;
  const PortableInt4& weight;

  const uint32_t* words(int64_t row, int64_t block) const {
    return weight.words(row, block * kInt4Lanes, kInt4Lanes, nullptr);
  }
  int shift_of(int64_t row) const { return 0; }

  template <int kRows>
  static void add(Int4FourRows<kRows>& rows, float* sums) {
    constexpr int kVector = kInt4Lanes * kRows;
    rows.template add<0>(sums);
    rows.template add<1>(sums + kVector);
    rows.template add<2>(sums + 2 * kVector);
    rows.template add<3>(sums + 3 * kVector);
    rows.template add<4>(sums + 4 * kVector);
    rows.shift(20);
    rows.template add<0>(sums + 5 * kVector);
    rows.template add<1>(sums + 6 * kVector);
    rows.template add<2>(sums + 7 * kVector);
  }
  static Tensor columns(const Tensor& sums, int64_t rows) {  // sums is (blocks, 8, rows, 16)
    return int4_scale_nibbles(sums, rows, {0, 1, 2, 3, 4, 0, 1, 2})
        .view({-1, kVectors, rows, kInt4Lanes})
        .permute({2, 0, 3, 1})
        .reshape({rows, -1});
  }
};

struct RepackedInt4Columns {
  static constexpr int64_t kColumns = RepackedInt4Rows::kColumns, kVectors = 4;
  const RepackedInt4& weight;

  const uint32_t* words(int64_t row, int64_t block) const {
    const int64_t chunk = row / kInt4TileRows * weight.shape.chunks() + block;
    return weight.word_data + chunk * kInt4ChunkWords + row % 8 * kInt4Lanes;
  }
  // Returns the bit shift of the nibbles of a row. Four rows that start at a multiple of four lie
  // in the same half of a tile and have the same shift.
  int shift_of(int64_t row) const { return row % kInt4TileRows / 8 * 4; }

  template <int kRows>
  static void add(Int4FourRows<kRows>& rows, float* sums) {
    constexpr int kVector = kInt4Lanes * kRows;
    rows.template add<0>(sums);
    rows.template add<2>(sums + kVector);
    rows.template add<4>(sums + 2 * kVector);
    rows.shift(24);
    rows.template add<0>(sums + 3 * kVector);
  }
  static Tensor columns(const Tensor& sums, int64_t rows) {  // inverts the order of x_lanes()
    return int4_scale_nibbles(sums, rows, {0, 2, 4, 0})
        .view({-1, 2, 2, rows, 4, 4})
        .permute({3, 0, 5, 2, 4, 1})
        .reshape({rows, -1});
  }
};

template <typename Weight>
using Int4Columns = std::conditional_t<std::is_same_v<Weight, PortableInt4>, PortableInt4Columns,
                                       RepackedInt4Columns>;

template <typename Weight>
bool supports_int4_rows_backward(const Tensor& dy, const Weight& weight) {
  return dy.size(0) <= kInt4FewGradientRows && dy.scalar_type() != at::kDouble &&
         weight.shape.group_units() * kInt4Unit % Int4Columns<Weight>::kColumns == 0;
}

// Adds dy @ W to blocks [first, end) of `sums` (blocks, vectors, kRows, 16), which the caller must
// have set to 0. `dy` is the transposed gradient (N, kRows). The sums keep the factors 16^kNibble
// of Int4FourRows::add(); Layout::columns() removes these factors.
template <int kRows, typename Layout>
void int4_rows_backward(float* sums, const float* dy, const float* scales, const Layout& layout,
                        int64_t first, int64_t end) {
  using Rows = Int4FourRows<kRows>;
  constexpr int64_t kBlock = Layout::kVectors * kRows * kInt4Lanes;
  const auto& weight = layout.weight;
  const int64_t n = weight.shape.n, group_columns = weight.shape.group_units() * kInt4Unit;
  for (int64_t row = 0; row < n; row += Rows::kRowBlock) {
    for (int64_t block = first; block < end; ++block) {
      const int64_t group = block * Layout::kColumns / group_columns;
      Rows rows;
      for (int i = 0; i < Rows::kRowBlock; ++i) {
        const int64_t source = row + i;
        if (source < n) {
          rows.set(i, layout.words(source, block), weight.zero(source, group),
                   scales[weight.scale_at(source, group)], dy + source * kRows);
        } else {
          rows.clear(i);
        }
      }
      rows.shift(layout.shift_of(row));
      Layout::add(rows, sums + block * kBlock);
    }
  }
}

// Computes dx (rows, K) = dy (rows, N) @ W.
template <typename Weight>
void int4_rows_backward_into(const Tensor& dx, const Tensor& dy, const Weight& weight) {
  using Layout = Int4Columns<Weight>;
  constexpr int64_t kTaskBlocks = 8;
  const Layout layout = {weight};
  const int64_t rows = dy.size(0), width = int4_row_count(rows), k = dx.size(1);
  const int64_t blocks = (k + Layout::kColumns - 1) / Layout::kColumns;
  const Tensor padded = at::constant_pad_nd(dy.to(at::kFloat), {0, 0, 0, width - rows});
  const Tensor columns = padded.t().contiguous();
  const Tensor sums = at::zeros({blocks, Layout::kVectors, width, kInt4Lanes}, columns.options());
  const Tensor scales = weight.scales.to(at::kFloat);
  const float* scale_data = scales.const_data_ptr<float>();
  float* to = sums.mutable_data_ptr<float>();
  const float* from = columns.const_data_ptr<float>();
  parallel_tasks((blocks + kTaskBlocks - 1) / kTaskBlocks, [&](int64_t task) {
    const int64_t first = task * kTaskBlocks, end = std::min(blocks, first + kTaskBlocks);
    with_vectors([&] {
      switch (width) {
        case 1:
          return int4_rows_backward<1>(to, from, scale_data, layout, first, end);
        case 2:
          return int4_rows_backward<2>(to, from, scale_data, layout, first, end);
        case 4:
          return int4_rows_backward<4>(to, from, scale_data, layout, first, end);
        default:
          return int4_rows_backward<8>(to, from, scale_data, layout, first, end);
      }
    });
  });
  dx.copy_(Layout::columns(sums, width).narrow(0, 0, rows).narrow(1, 0, k));
}

}  // namespace torchweld
