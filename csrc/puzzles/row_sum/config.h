// Chooses the kernel that sums each row of a matrix, and the splits of long rows. This is pure host
// code.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace torchweld {

// A tile. `threads` is the number of threads that together sum a row or a split of a row. Each of
// these threads has `loads` 16-byte accesses in flight.
struct RowSumTile {
  int threads;
  int loads;
};

// The tiles, sorted by size. The first tile that reads the row in one pass is chosen. If no tile
// does, the last tile is chosen. The threads of the last tile are a whole block.
inline constexpr RowSumTile kRowSumTiles[] = {{1, 2},  {2, 2},  {4, 2},  {8, 2},  {16, 2},
                                              {32, 2}, {32, 4}, {32, 8}, {256, 4}};
inline constexpr int kNumRowSumTiles = sizeof(kRowSumTiles) / sizeof(kRowSumTiles[0]);
inline constexpr int kRowSumThreads = 256;  // the number of threads per block of every tile

// Unaligned rows that are contiguous and have at most kStagedRowBytes bytes go through shared
// memory, kStagedBytes bytes at a time.
inline constexpr int kStagedRowBytes = 2048;
inline constexpr int kStagedBytes = 16384;

// The number of splits per SM. If kFewSplitsPerSm splits per SM would have fewer than
// kGoodSplitBytes bytes each, there are kFewSplitsPerSm. Otherwise there are as many as possible
// with at least kGoodSplitBytes bytes each, but at most kSplitsPerSm. In both cases, a split has at
// least kMinSplitBytes bytes. A split has more than kMaxSplitBytes bytes only if the row would
// otherwise have more than kMaxSplits splits.
inline constexpr int64_t kMinSplitBytes = 16 << 10;
inline constexpr int64_t kMaxSplitBytes = 256 << 10;
inline constexpr int64_t kGoodSplitBytes = 128 << 10;
inline constexpr int64_t kSplitsPerSm = 8;
inline constexpr int64_t kFewSplitsPerSm = 4;
// The maximum number of splits of a row. It is limited, because one block adds up the partials of a
// row.
inline constexpr int64_t kMaxSplits = 4096;
// Calls with more than kMaxSplitRows rows fill the GPU without splits.
inline constexpr int64_t kMaxSplitRows = 16384;

struct RowSumProblem {
  int64_t rows;
  int64_t n;
  int elem_size;    // size of an element in bytes
  bool contiguous;  // whether the rows follow each other without gaps
  bool aligned;     // whether every row starts on a 16-byte boundary
  bool bfloat16;
  DeviceFacts device;
};

// kTile assigns a group of threads to each row. kStaged copies contiguous rows to shared memory
// first.
enum class RowSumEngine : int8_t { kTile, kStaged };

struct RowSumChoice {
  RowSumEngine engine;
  int tile;             // index into kRowSumTiles, 0 for kStaged
  int64_t splits;       // the number of splits of a row
  int64_t split_elems;  // number of elements of a split; the last split may have fewer

  constexpr int64_t partials(int64_t rows) const { return splits > 1 ? rows * splits : 0; }
};

// Returns the number of elements in a split. It is a multiple of the number of elements that a
// block reads at once, so that every split has the alignment of the row.
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
  // Round the size of a split up to a multiple of the number of bytes that a block reads at once,
  // so that every split has the alignment of the row.
  const int64_t round = int64_t{16} * kRowSumTiles[last].threads * kRowSumTiles[last].loads;
  const int64_t split_elems = (split_bytes + round - 1) / round * round / problem.elem_size;
  return {RowSumEngine::kTile, last, (problem.n + split_elems - 1) / split_elems, split_elems};
}

}  // namespace torchweld
