// Split-K and the time model of matmuls with a 4-bit weight. This is pure host code.
//
// The model is a sum of three terms: the time of the k-blocks of a tile, the time to fill the
// pipeline, and the time to reduce the splits. The time of a k-block depends on the number of
// blocks that the SM runs. The model predicts measurements within a few percent. A simpler model,
// which assumed a fraction of the peak rates, was wrong by a factor of two, because each split
// costs time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "int4/layout.h"

namespace torchweld {

// Returns the number of k-blocks in a split of K, or 0 if a split would be empty. The last split
// may have fewer k-blocks. A k-block has `chunks` chunks of 64 columns.
inline int64_t int4_split_k_blocks(const Int4Shape& shape, int chunks, int splits) {
  const int64_t k_blocks = (shape.chunks() + chunks - 1) / chunks;
  const int64_t split = (k_blocks + splits - 1) / splits;
  return (splits - 1) * split < k_blocks ? split : 0;
}

// The legal numbers of splits. Three splits are legal only for tiles with kThreeSplits, because
// only the kernels of these tiles are compiled for three splits.
inline constexpr int kInt4Splits[] = {1, 2, 3, 4, 8};

template <typename Tile>
constexpr bool int4_allows_splits(int64_t splits) {
  for (const int known : kInt4Splits) {
    if (splits == known) return splits != 3 || Tile::kThreeSplits;
  }
  return false;
}

// Times in nanoseconds, fitted to 16-bit products on an H200 (K = 4096, groups of 128).
struct Int4Times {
  double k_block;  // the time of a k-block, with one block on the SM
  double busy;     // b blocks on an SM need max(k_block, b * busy) for one k-block of each block
  double fill;     // the time of filling the ring and of the epilogue
  double reduce;   // the time of adding the partials of two splits in a cluster
};

// Estimates the time of `tiles` tiles of y. Each tile has `splits` splits of `k_blocks` k-blocks,
// and an SM runs `resident` blocks at once.
inline double int4_blocks_time(const Int4Times& times, double tiles, int splits, int64_t k_blocks,
                               int resident, int sms, bool clusters) {
  const bool reduces = splits > 1 && clusters;
  // NOTE: clusters of more than two blocks leave some SMs of a GPC unused: 132 SMs run 39 clusters
  // of three blocks or 30 clusters of four blocks.
  const double usable = !reduces || splits == 2 ? 1
                        : splits == 3           ? 0.89
                        : splits == 4           ? 0.91
                                                : 0.85;
  const auto wave = [&](double blocks) {
    return times.fill +
           static_cast<double>(k_blocks) * std::max(times.k_block, blocks * times.busy) +
           (reduces ? blocks * times.reduce * splits / 2 : 0);
  };
  // The number of blocks that the busiest SM runs.
  const double load = std::ceil(tiles * splits / (sms * usable));
  const double waves = std::floor(load / resident), rest = load - waves * resident;
  return waves * wave(resident) + (rest > 0 ? wave(rest) : 0);
}

}  // namespace torchweld
