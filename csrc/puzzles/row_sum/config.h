// Which kernel a sum over rows takes, and how long rows are split. Pure host code.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace torchweld {

// `threads` threads share a row, or a part of it, and have `loads` 16-byte accesses each in flight.
struct RowSumTile {
  int threads;
  int loads;
};

// In the order of preference: the first that reads the row at one go, else the last one, which is
// a whole block.
inline constexpr RowSumTile kRowSumTiles[] = {{1, 2},  {2, 2},  {4, 2},  {8, 2},  {16, 2},
                                              {32, 2}, {32, 4}, {32, 8}, {256, 4}};
inline constexpr int kNumRowSumTiles = sizeof(kRowSumTiles) / sizeof(kRowSumTiles[0]);
inline constexpr int kRowSumThreads = 256;  // of a block, whatever the tile

// Rows that are not made of whole 16-byte pieces and are this short are read as one stretch of
// memory into shared memory, kStagedBytes at a time.
inline constexpr int kStagedRowBytes = 2048;
inline constexpr int kStagedBytes = 16384;

// A part of a row is between these sizes: small enough for kPartsPerSm of them an SM, or for
// kFewPartsPerSm where it then is no more than kGoodPartBytes.
inline constexpr int64_t kMinPartBytes = 16 << 10;
inline constexpr int64_t kMaxPartBytes = 256 << 10;
inline constexpr int64_t kGoodPartBytes = 128 << 10;
inline constexpr int64_t kPartsPerSm = 8;
inline constexpr int64_t kFewPartsPerSm = 4;
inline constexpr int64_t kMaxParts = 4096;       // one block adds all of a row's parts
inline constexpr int64_t kMaxSplitRows = 16384;  // more rows than this fill the chip anyway

struct RowSumProblem {
  int64_t rows;
  int64_t n;
  int elem_size;    // bytes
  bool contiguous;  // one row follows another in memory
  bool aligned;     // every row starts on a 16-byte boundary
  bool bfloat16;
  DeviceFacts device;
};

// kTile: a group of threads a row. kStaged: rows as one stretch of memory through shared memory.
enum class RowSumEngine : int8_t { kTile, kStaged };

struct RowSumChoice {
  RowSumEngine engine;
  int tile;            // index into kRowSumTiles, 0 for kStaged
  int64_t parts;       // of a row
  int64_t part_elems;  // the length of all parts but the last

  constexpr int64_t partials(int64_t rows) const { return parts > 1 ? rows * parts : 0; }
};

// Whole rounds of the block, so that every part starts as the row does with respect to 16 bytes.
constexpr int64_t row_sum_part_elems(const RowSumProblem& p, int64_t parts) {
  const RowSumTile& tile = kRowSumTiles[kNumRowSumTiles - 1];
  const int64_t round = int64_t{16} / p.elem_size * tile.threads * tile.loads;
  const int64_t part = (p.n + parts - 1) / parts;
  return (part + round - 1) / round * round;
}

constexpr RowSumChoice choose_row_sum(const RowSumProblem& problem) {
  const int64_t bytes = problem.n * problem.elem_size;
  const bool whole_pieces = problem.aligned && bytes % 16 == 0;
  if (problem.contiguous && !whole_pieces && bytes <= kStagedRowBytes) {
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
  const int64_t large = total / (kFewPartsPerSm * problem.device.sms);
  int64_t part = total / (kPartsPerSm * problem.device.sms);
  part = large < kGoodPartBytes ? large : (part < kGoodPartBytes ? kGoodPartBytes : part);
  part = part < kMinPartBytes ? kMinPartBytes : (part > kMaxPartBytes ? kMaxPartBytes : part);
  const int64_t least = (bytes + kMaxParts - 1) / kMaxParts;
  part = part < least ? least : part;
  // Whole rounds of the block, so that every part starts as the row does with respect to 16 bytes.
  const int64_t round = int64_t{16} * kRowSumTiles[last].threads * kRowSumTiles[last].loads;
  const int64_t part_elems = (part + round - 1) / round * round / problem.elem_size;
  return {RowSumEngine::kTile, last, (problem.n + part_elems - 1) / part_elems, part_elems};
}

}  // namespace torchweld
