// Attention forward on Hopper: zeroes rows of V in shared memory that no query row of the work tile
// sees. P is 0 for these rows, but V may be NaN.
//
// All 128 threads of a warpgroup call these functions and must then meet at a barrier. `thread` is
// the index of the thread in its warpgroup.
#pragma once

#include "attention/sm90/fwd_block.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// Zeroes rows [begin, end) of a tile of V. `begin` must be less than `end`.
template <class Config>
__device__ __forceinline__ void zero_v_rows(char* s_value, int begin, int end, int thread) {
  for (int i = thread; i < (end - begin) * Config::kBoxesV * 8; i += 128) {
    const int box_row = i / 8, box = box_row / (end - begin);
    const int row = begin + box_row - box * (end - begin);
    *reinterpret_cast<uint4*>(s_value + box * Config::kKeyBoxBytes + row * kSwizzleRowBytes +
                              i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  async_fence();
}

// Zeroes the rows that lie in a gap between documents. The tile of keys starts at `key`.
template <class Config, class Gaps>
__device__ __forceinline__ void zero_v_gaps(char* s_value, const Gaps& gaps, int key, int thread) {
#pragma unroll 1
  for (int i = thread; i < Config::kKeys * Config::kBoxesV * 8; i += 128) {
    if (!gaps.contains(key + i / 8 % Config::kKeys)) continue;
    *reinterpret_cast<uint4*>(s_value + i * 16) = make_uint4(0, 0, 0, 0);
  }
  async_fence();
}
#endif

}  // namespace torchweld
