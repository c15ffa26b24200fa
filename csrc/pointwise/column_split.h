// How a sum over the rows of a (rows, n) matrix is split among blocks. Pure host code; the same
// for every alignment and dtype, so that a caller knows the scratch before the kernel is chosen.
#pragma once

#include <cstdint>

namespace torchweld {

struct ColumnSplit {
  int64_t rows_per_chunk;
  int64_t chunks;
};

// NOTE: of more columns there are never more chunks; a pass over 2n columns counts on it.
constexpr ColumnSplit split_rows(int64_t rows, int64_t n) {
  constexpr int64_t kTileColumns = 256;  // of a block in 16 bits
  constexpr int64_t kTargetBlocks = 2112;
  constexpr int64_t kMaxChunks = 256;  // one block adds all of a column's chunks
  constexpr int64_t kMinRowsInChunk = 32;
  const int64_t tiles = (n + kTileColumns - 1) / kTileColumns;
  const int64_t wanted = kTargetBlocks / tiles;
  const int64_t most = (rows + kMinRowsInChunk - 1) / kMinRowsInChunk;
  int64_t chunks = wanted < kMaxChunks ? wanted : kMaxChunks;
  chunks = chunks < most ? chunks : most;
  chunks = chunks < 1 ? 1 : chunks;
  const int64_t rows_per_chunk = (rows + chunks - 1) / chunks;
  return {rows_per_chunk, (rows + rows_per_chunk - 1) / rows_per_chunk};
}

// The fp32 values of scratch that one sum over the rows needs.
constexpr int64_t column_partials(int64_t rows, int64_t n) {
  return split_rows(rows, n).chunks * n;
}

}  // namespace torchweld
