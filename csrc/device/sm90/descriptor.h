// Matrix descriptors with which wgmma reads operand tiles from shared memory, and the positions of
// the elements of a tile under the 128-byte swizzle. For host and device.
//
// A tile consists of swizzle rows of 128 bytes. Eight swizzle rows form a swizzle atom of 1024
// bytes, which must start on a 1024-byte boundary.
//   K-major   a swizzle row is a row (M or N) of one k-block; rows follow one another
//   MN-major  a swizzle row is a column (K) of 128 bytes of M or N; columns follow one another, and
//             the next 128 bytes of M or N lie `leading_bytes` further
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

inline constexpr int kSwizzleRowBytes = 128, kSwizzleAtomBytes = 1024;
inline constexpr int kSameValuesBytes = 256;  // the bytes that a wgmma with N = 8 reads

// The position of 16-byte chunk `chunk` in swizzle row `row` under the 128-byte swizzle.
TW_HOST_DEVICE constexpr int swizzled_chunk(int row, int chunk) { return chunk ^ (row & 7); }

// s_tile is the shared-memory address of the first element that the wgmma reads.
TW_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t s_tile, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kAtom = uint64_t{kSwizzleAtomBytes >> 4} << 32;
  return kSwizzle128 | kAtom | uint64_t{leading_bytes >> 4} << 16 | (s_tile & 0x3ffff) >> 4;
}

// The descriptor of a K-major tile. The next slice of K (16 16-bit or 8 fp32 values) lies 32 bytes
// further.
TW_HOST_DEVICE constexpr uint64_t k_major_descriptor(uint32_t s_tile) {
  // leading_bytes is unused, because a swizzle row covers the whole k-block.
  return matrix_descriptor(s_tile, 16);
}

// The descriptor of an MN-major tile. The next slice of K lies 16 swizzle rows further.
TW_HOST_DEVICE constexpr uint64_t mn_major_descriptor(uint32_t s_tile, uint32_t leading_bytes) {
  return matrix_descriptor(s_tile, leading_bytes);
}

// The descriptor of an operand with eight rows of one repeated value. The kSameValuesBytes bytes at
// s_values must be filled with that value.
TW_HOST_DEVICE constexpr uint64_t same_values_descriptor(uint32_t s_values) {
  // The distance between the two atoms of 8 rows and 8 elements of K.
  constexpr uint64_t kApart = kSameValuesBytes / 2 >> 4;
  return kApart << 32 | kApart << 16 | (s_values & 0x3ffff) >> 4;
}

}  // namespace torchweld
