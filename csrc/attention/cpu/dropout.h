// CPU: drops probabilities of attention (attention/dropout.h).
#pragma once

#include "attention/cpu/tiles.h"

namespace torchweld {

// Writes the factors of the probabilities of a query row and the keys [key, key + count): 0 for a
// dropped one, else 1 / (1 - p). Two factors are `step` elements apart.
template <typename acc_t>
void dropout_factors(const AttentionDropout& dropout, acc_t* to, int64_t step, int64_t head,
                     int64_t row, int64_t key, int64_t count) {
  constexpr int64_t kKeys = DropoutBits::kKeys;
  const auto factor = static_cast<acc_t>(dropout.factor);
  for (int64_t j = key; j < key + count;) {
    const DropoutBits bits(static_cast<uint64_t>(*dropout.seed), static_cast<uint32_t>(head),
                           static_cast<uint32_t>(row), static_cast<uint32_t>(j / kKeys));
    const int64_t end = std::min(key + count, (j / kKeys + 1) * kKeys);
    for (; j < end; ++j, to += step) {
      *to = dropout.keeps(bits[static_cast<int>(j % kKeys)]) ? factor : acc_t(0);
    }
  }
}

// Writes the factors of a tile of scores (64, width). They are 0 in lanes without a row.
template <typename acc_t>
void dropout_tile(const CpuAttention& a, int64_t b, int64_t h, const QueryBlock& block,
                  int64_t tile, acc_t* to) {
  const int64_t width = a.block_rows(), keys = block.keys_in(tile);
  for (int64_t r = 0; r < width; ++r) {
    if (r < block.rows) {
      dropout_factors(a.mask.dropout, to + r, width, b * a.nheads + h, block.row + r,
                      block.first_key + tile * kTileKeys, keys);
    } else {
      for (int64_t c = 0; c < keys; ++c) to[c * width + r] = 0;
    }
  }
}

template <typename acc_t>
void multiply(acc_t* to, const acc_t* factors, int64_t count) {
  with_vectors([&] {
    for (int64_t i = 0; i < count; ++i) to[i] *= factors[i];
  });
}

}  // namespace torchweld
