// Chooses the kernel of a sum over rows and the splits of long rows. Pure host code.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace torchweld {

// `threads` threads sum a row, or a split of one, with `loads` 16-byte accesses each in flight.
struct RowSumTile {
  int threads;
  int loads;
};

// Sorted by size: the first tile that reads the row in one pass is chosen, else the last one, which
// is a whole block.
inline constexpr RowSumTile kRowSumTiles[] = {{1, 2},  {2, 2},  {4, 2},  {8, 2},  {16, 2},
                                              {32, 2}, {32, 4}, {32, 8}, {256, 4}};
inline constexpr int kNumRowSumTiles = sizeof(kRowSumTiles) / sizeof(kRowSumTiles[0]);
inline constexpr int kRowSumThreads = 256;  // of a block, for every tile

// Contiguous unaligned rows of at most this size are staged in shared memory, kStagedBytes at a
// time.
inline constexpr int kStagedRowBytes = 2048;
inline constexpr int kStagedBytes = 16384;

// The size of a split lies between min and max. It is chosen for kSplitsPerSm splits per SM, or for
// kFewSplitsPerSm if the split is then at most kGoodSplitBytes.
inline constexpr int64_t kMinSplitBytes = 16 << 10;
inline constexpr int64_t kMaxSplitBytes = 256 << 10;
inline constexpr int64_t kGoodSplitBytes = 128 << 10;
inline constexpr int64_t kSplitsPerSm = 8;
inline constexpr int64_t kFewSplitsPerSm = 4;
inline constexpr int64_t kMaxSplits = 4096;      // one block adds a row's partials
inline constexpr int64_t kMaxSplitRows = 16384;  // more rows fill the GPU without splits

struct RowSumProblem {
  int64_t rows;
  int64_t n;
  int elem_size;    // bytes
  bool contiguous;  // rows follow each other without gaps
  bool aligned;     // every row is 16-byte aligned
  bool bfloat16;
  DeviceFacts device;
};

// kTile: a group of threads per row. kStaged: contiguous rows staged in shared memory.
enum class RowSumEngine : int8_t { kTile, kStaged };

struct RowSumChoice {
  RowSumEngine engine;
  int tile;             // index into kRowSumTiles, 0 for kStaged
  int64_t splits;       // of a row
  int64_t split_elems;  // elements of a split; the last one may have fewer

  constexpr int64_t partials(int64_t rows) const { return splits > 1 ? rows * splits : 0; }
};

// Elements of a split: a multiple of what a block reads at once, so that every split has the row's
// alignment.
constexpr int64_t row_sum_split_elems(const RowSumProblem& p, int64_t splits) {
  const RowSumTile& tile = kRowSumTiles[kNumRowSumTiles - 1];
  const int64_t round = int64_t{16} / p.elem_size * tile.threads * tile.loads;
  const int64_t elems = (p.n + splits - 1) / splits;
  return (elems + round - 1) / round * round;
}

constexpr RowSumChoice choose_row_sum(const RowSumProblem& problem) {
  const int64_t bytes = problem.n * problem.elem_size;
  const bool aligned = problem.aligned && bytes % 16 == 0;
  if (problem.contiguous && !aligned && bytes <= kStagedRowBytes) {
    return {RowSumEngine::kStaged, 0, 1, problem.n};
  }
  for (int i = 0; i < kNumRowSumTiles - 1; ++i) {
    if (bytes <= int64_t{16} * kRowSumTiles[i].threads * kRowSumTiles[i].loads) {
      return {RowSumEngine::kTile, i, 1, problem.n};
    }
  }
  const int last = kNumRowSumTiles - 1;
  if (problem.rows > kMaxSplitRows) return {RowSumEngine::kTile, last, 1, problem.n};
  const int64_t total = problem.rows * bytes;
  const int64_t large = total / (kFewSplitsPerSm * problem.device.sms);
  int64_t split_bytes = total / (kSplitsPerSm * problem.device.sms);
  split_bytes = large < kGoodSplitBytes
                    ? large
                    : (split_bytes < kGoodSplitBytes ? kGoodSplitBytes : split_bytes);
  split_bytes = split_bytes < kMinSplitBytes
                    ? kMinSplitBytes
                    : (split_bytes > kMaxSplitBytes ? kMaxSplitBytes : split_bytes);
  const int64_t min_bytes = (bytes + kMaxSplits - 1) / kMaxSplits;
  split_bytes = split_bytes < min_bytes ? min_bytes : split_bytes;
  // A multiple of what a block reads at once, so that every split has the row's alignment.
  const int64_t round = int64_t{16} * kRowSumTiles[last].threads * kRowSumTiles[last].loads;
  const int64_t split_elems = (split_bytes + round - 1) / round * round / problem.elem_size;
  return {RowSumEngine::kTile, last, (problem.n + split_elems - 1) / split_elems, split_elems};
}

}  // namespace torchweld
