// The two layouts of 4-bit weights. weight (N, K) = scale * (code - zero). Each row has one scale
// and one zero per group of columns.
//
// Portable layout: a word holds eight consecutive codes of a row, the first code in the lowest
// nibble. These eight codes are called a unit.
//
// Repacked layout: the rows form tiles of 16 rows. A tile is a sequence of chunks of 64 columns. A
// chunk has four words for each of 32 lanes. Word s of lane l holds eight codes of columns 16 s to
// 16 s + 15. Lane l holds these values in the 16 x 16 register operand of mma.sync or wgmma. g is l
// / 4 and t is l % 4. For i from 0 to 3:
//   nibble i      code 2t of unit 2 s + i / 2 of the chunk, in row g + 8 * (i % 2) of the tile
//   nibble i + 4  code 2t + 1 of this unit, in this row
// One shift and one mask unpack nibbles i and i + 4 into the two halves of a register. Rows and
// units behind the end of the weight are 0. All kernels read this layout.
//   packed        (tiles, chunks, 128) words; the four words of a lane are adjacent
//   packed_scale  (tiles, groups, 16) scales of the rows in the order 0, 8, 1, 9, ..., so that one
//                 load reads the scales of both rows of a lane
//   packed_zero   (tiles, groups, 2) words of eight zeros: of rows 0-7, then of rows 8-15
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

inline constexpr int kInt4Unit = 8;       // the number of codes in a word
inline constexpr int kInt4TileRows = 16;  // the number of weight rows in a tile
inline constexpr int kInt4ChunkK = 64;    // the number of columns (of K) in a chunk
inline constexpr int kInt4ChunkUnits = kInt4ChunkK / kInt4Unit;
inline constexpr int kInt4ChunkWords = 128;  // the number of words in a chunk

// The sizes of a weight and of its repacked form.
struct Int4Shape {
  int64_t n, k, groups;

  TW_HOST_DEVICE int64_t units() const { return k / kInt4Unit; }
  TW_HOST_DEVICE int64_t tiles() const { return (n + kInt4TileRows - 1) / kInt4TileRows; }
  TW_HOST_DEVICE int64_t chunks() const { return (k + kInt4ChunkK - 1) / kInt4ChunkK; }
  TW_HOST_DEVICE int64_t packed_words() const { return tiles() * chunks() * kInt4ChunkWords; }
  // The number of units in a group, or 1 if there are no groups.
  TW_HOST_DEVICE int64_t group_units() const { return groups > 0 ? units() / groups : 1; }
};

TW_HOST_DEVICE uint32_t int4_code(uint32_t word, int i) { return word >> (4 * i) & 15; }

// Builds a word of the repacked layout. word_of(row, unit) must return the portable word for a row
// of the tile and a unit of the chunk.
template <typename WordOf>
TW_HOST_DEVICE uint32_t int4_repacked_word(int lane, int slice, const WordOf& word_of) {
  const int g = lane / 4, t = lane % 4;
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = word_of(g + 8 * (i % 2), 2 * slice + i / 2) >> (8 * t);
    packed |= (pair & 15) << (4 * i) | (pair >> 4 & 15) << (4 * i + 16);
  }
  return packed;
}

// The inverse of int4_repacked_word. Reads the words of a chunk and returns the portable word of
// row `row` of the tile and unit `unit` of the chunk.
TW_HOST_DEVICE uint32_t int4_portable_word(const uint32_t* chunk, int row, int unit) {
  const int i = row / 8 + 2 * (unit % 2);
  uint32_t word = 0;
  for (int t = 0; t < 4; ++t) {
    const uint32_t packed = chunk[(row % 8 * 4 + t) * 4 + unit / 2];
    word |= int4_code(packed, i) << (8 * t) | int4_code(packed, i + 4) << (8 * t + 4);
  }
  return word;
}

// Returns the index of a row's scale among the 16 scales that a tile has for a group.
TW_HOST_DEVICE int int4_scale_place(int row) { return row % 8 * 2 + row / 8; }

}  // namespace torchweld
