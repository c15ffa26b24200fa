// Stores fragments of mma.sync and wgmma to shared memory.
// Source: PTX ISA, "Warp-level matrix store instruction: stmatrix".
#pragma once

#include "device/features.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/descriptor.h"

namespace torchweld {

#if TW_HAS_CLUSTERS
// Stores four 8 x 8 matrices of 16-bit elements from registers to shared memory. The store is the
// inverse of ldmatrix. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_4(uint32_t s_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements and transposes each of them. Lane l passes the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_4_transposed(uint32_t s_row, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// Returns the offset of the row that a lane passes to store_matrix_4_transposed, in a tile with the
// 128-byte swizzle. The matrices are 16 rows from first_row on, a multiple of 8, of the 16 columns
// with index `group`. Matrices 0 and 1 have the first 8 rows, and matrices 2 and 3 have the last 8.
// Matrices 0 and 2 have the first 8 columns, and matrices 1 and 3 have the last 8.
__device__ __forceinline__ uint32_t transposed_lane_offset(int lane, int first_row, int group) {
  const int row = lane % 8 + lane / 16 * 8, chunk = 2 * group + lane / 8 % 2;
  return (first_row + row) * kSwizzleRowBytes + (swizzled_chunk(row, chunk) << 4);
}
#endif

}  // namespace torchweld
