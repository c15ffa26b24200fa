// How wgmma is told of an operand tile in shared memory (matrix descriptors), and where the tile's
// elements lie under the 128-byte swizzle. Host and device.
//
// A tile is made of lines of 128 bytes, eight of which are 1024 bytes and start on such a boundary.
//   K-major   a line is a row (M or N) and holds one step of K; rows follow one another
//   MN-major  a line is a column (K) of 128 bytes of M or N; columns follow one another, and
//   stretches
//             of M or N lie `stretch_bytes` apart
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

inline constexpr int kSwizzleRowBytes = 128, kSwizzleAtomBytes = 1024;
inline constexpr int kSameValuesBytes = 256;  // that a product of 8 columns reads

// The 16-byte piece of line `line` that holds piece `piece` of it.
TW_HOST_DEVICE constexpr int swizzled_chunk(int line, int piece) { return piece ^ (line & 7); }

// s_tile: where the tile, or the part of it that is to be read, starts in shared memory.
TW_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t s_tile, uint32_t stretch_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kAtom = uint64_t{kSwizzleAtomBytes >> 4} << 32;
  return kSwizzle128 | kAtom | uint64_t{stretch_bytes >> 4} << 16 | (s_tile & 0x3ffff) >> 4;
}

// K-major: 32 bytes further is the next slice of K (16 16-bit or 8 fp32 values).
TW_HOST_DEVICE constexpr uint64_t k_major_descriptor(uint32_t s_tile) {
  return matrix_descriptor(s_tile, 16);  // one line has all of a step: no stretches
}

// MN-major: 16 lines further is the next slice of K.
TW_HOST_DEVICE constexpr uint64_t mn_major_descriptor(uint32_t s_tile, uint32_t stretch_bytes) {
  return matrix_descriptor(s_tile, stretch_bytes);
}

// Eight columns that hold one value alone, as the bytes from s_values on do.
TW_HOST_DEVICE constexpr uint64_t same_values_descriptor(uint32_t s_values) {
  constexpr uint64_t kApart = kSameValuesBytes / 2 >> 4;  // the two pieces of 8 rows and 8 of K
  return kApart << 32 | kApart << 16 | (s_values & 0x3ffff) >> 4;
}

}  // namespace torchweld
