// CPU: drops probabilities of attention (attention/dropout.h).
#pragma once

#include "attention/cpu/tiles.h"

namespace torchweld {

// The places of some probabilities of a head: query rows [row, row + rows), keys [key, key + keys).
struct DropoutPlaces {
  int64_t head, row, rows, key, keys;
};

// Writes the factors of probabilities: 0 for a dropped one, else 1 / (1 - p). The factors of two
// rows are row_step elements apart, those of two keys are key_step elements apart.
template <typename acc_t>
void dropout_factors(const AttentionDropout& dropout, const DropoutPlaces& places, acc_t* to,
                     int64_t row_step, int64_t key_step) {
  constexpr int64_t kSquare = DropoutBits::kSquare;
  const auto factor = static_cast<acc_t>(dropout.factor);
  const auto [head, first_row, rows, first_key, keys] = places;
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    // The units of the row 8 before have the factors of this row, too.
    if (row & 8 && row - 8 >= first_row) continue;
    const int64_t other = row ^ 8, units = DropoutBits::key_unit(kSquare);
    const bool has_other = other >= first_row && other < first_row + rows;
    for (int64_t unit = first_key / kSquare * units; unit / units * kSquare < first_key + keys;
         ++unit) {
      const DropoutBits bits(static_cast<uint64_t>(*dropout.seed), static_cast<uint32_t>(head),
                             DropoutBits::row_unit(static_cast<uint32_t>(row)),
                             static_cast<uint32_t>(unit));
      for (const int64_t offset : {0, 1, 8, 9}) {
        const int64_t key = unit / units * kSquare + unit % units * 2 + offset;
        if (key < first_key || key >= first_key + keys) continue;
        const auto write = [&](int64_t row) {
          const uint32_t found = bits.at(static_cast<uint32_t>(row), static_cast<uint32_t>(key));
          to[(row - first_row) * row_step + (key - first_key) * key_step] =
              dropout.keeps(found) ? factor : acc_t(0);
        };
        write(row);
        if (has_other) write(other);
      }
    }
  }
}

// Writes the factors of a tile of scores (64, width). They are 0 in lanes without a row.
template <typename acc_t>
void dropout_tile(const CpuAttention& a, int64_t b, int64_t h, const QueryBlock& block,
                  int64_t tile, acc_t* to) {
  const int64_t width = a.block_rows(), keys = block.keys_in(tile);
  const int64_t rows = std::min<int64_t>(width, block.rows);
  dropout_factors(a.mask.dropout,
                  {b * a.nheads + h, block.row, rows, block.first_key + tile * kTileKeys, keys}, to,
                  1, width);
  for (int64_t c = 0; c < keys; ++c) {
    for (int64_t r = rows; r < width; ++r) to[c * width + r] = 0;
  }
}

template <typename acc_t>
void multiply(acc_t* to, const acc_t* factors, int64_t count) {
  with_vectors([&] {
    for (int64_t i = 0; i < count; ++i) to[i] *= factors[i];
  });
}

}  // namespace torchweld
