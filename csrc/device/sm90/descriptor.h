// The matrix descriptors of wgmma. A descriptor tells wgmma where a tile of an operand lies in
// shared memory. This header also computes the positions of elements under the 128-byte swizzle. It
// is for host and device.
//
// A tile consists of swizzle rows of 128 bytes. Eight swizzle rows form a swizzle atom of 1024
// bytes, which must start on a 1024-byte boundary.
//   K-major   A swizzle row holds one k-block of one index of M or N. The next swizzle row holds
//             the same k-block of the next index of M or N.
//   MN-major  A swizzle row holds 128 bytes along M or N, at one index of K. The next swizzle row
//             holds the next index of K. The next 128 bytes along M or N lie `leading_bytes`
//             further on.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

inline constexpr int kSwizzleRowBytes = 128, kSwizzleAtomBytes = 1024;
// The number of bytes of B that a wgmma with N = 8 reads.
inline constexpr int kSameValuesBytes = 256;

// Returns where the 128-byte swizzle puts 16-byte chunk `chunk` within swizzle row `row`.
TW_HOST_DEVICE constexpr int swizzled_chunk(int row, int chunk) { return chunk ^ (row & 7); }

// Returns the descriptor of a tile with the 128-byte swizzle. s_tile is the shared-memory address
// of the first element that the wgmma reads.
TW_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t s_tile, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kAtom = uint64_t{kSwizzleAtomBytes >> 4} << 32;
  return kSwizzle128 | kAtom | uint64_t{leading_bytes >> 4} << 16 | (s_tile & 0x3ffff) >> 4;
}

// Returns the descriptor of a K-major tile. A wgmma reads a slice of 16 16-bit values or 8 fp32
// values along K. The next slice is 32 bytes further on.
TW_HOST_DEVICE constexpr uint64_t k_major_descriptor(uint32_t s_tile) {
  // wgmma does not use leading_bytes here, because a swizzle row covers the whole k-block.
  return matrix_descriptor(s_tile, 16);
}

// Returns the descriptor of an MN-major tile. A wgmma reads a slice of 16 values along K. The next
// slice is 16 swizzle rows further on.
TW_HOST_DEVICE constexpr uint64_t mn_major_descriptor(uint32_t s_tile, uint32_t leading_bytes) {
  return matrix_descriptor(s_tile, leading_bytes);
}

// Returns the descriptor of a K-major operand without swizzle. Each row of the operand has eight
// 16-bit values. wgmma needs 16 values along K, so it reads the eight values of a row twice. In
// operand A, values 8 to 15 along K must be 0.
TW_HOST_DEVICE constexpr uint64_t half_slice_descriptor(uint32_t s_tile) {
  constexpr uint64_t kAtom = uint64_t{8 * 16 >> 4} << 32;  // eight rows of 16 bytes
  return kAtom | (s_tile & 0x3ffff) >> 4;
}

// Returns the descriptor of an operand with eight rows. All elements of the operand have one value.
// The kSameValuesBytes bytes at s_values must be filled with this value.
TW_HOST_DEVICE constexpr uint64_t same_values_descriptor(uint32_t s_values) {
  // The distance between the operand's two atoms, in units of 16 bytes. An atom has 8 rows and 8
  // elements along K.
  constexpr uint64_t kApart = kSameValuesBytes / 2 >> 4;
  return kApart << 32 | kApart << 16 | (s_values & 0x3ffff) >> 4;
}

}  // namespace torchweld
