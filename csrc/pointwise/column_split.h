// Decides how a sum over the rows of a (rows, n) matrix is split among blocks. This is pure host
// code. The split depends only on rows and n. A caller therefore knows the size of the scratch
// memory before it knows the alignment and the dtype of the matrix.
#pragma once

#include <cstdint>

namespace torchweld {

struct ColumnSplit {
  int64_t rows_per_chunk;
  int64_t chunks;
};

// NOTE: the number of chunks must not grow with n, because callers of a pass over 2n columns
// allocate scratch memory for 2 * column_partials(rows, n) values.
constexpr ColumnSplit split_rows(int64_t rows, int64_t n) {
  constexpr int64_t kTileColumns = 256;  // the number of columns per block if elements have 16 bits
  constexpr int64_t kTargetBlocks = 2112;
  // The maximum number of chunks. It is limited, because one block adds up all chunks of a column.
  constexpr int64_t kMaxChunks = 256;
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

// Returns the number of fp32 values of scratch memory that one sum over the rows needs.
constexpr int64_t column_partials(int64_t rows, int64_t n) {
  return split_rows(rows, n).chunks * n;
}

}  // namespace torchweld
