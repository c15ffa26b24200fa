// A gap consists of keys that no row of a block sees, although they lie between the first and the
// last key that rows of the block see. Gaps are the padding between packed documents. P is 0 at the
// keys of a gap, but V may be NaN there. Therefore the kernels set V to 0 at these keys before the
// product P V.
//
// Gaps occur only under `causal` with key_start, or with a key_end per row. With a key_end per row,
// V must be finite in gaps, and the kernels do not look for gaps.
//
// Under `causal` with key_start, a row that sees any key also sees the key at its own position.
// Therefore the rows see all keys from the first seen key to the position of the block's first row.
// Every later key is at the position of a row of the block. If the key is in a gap, this row sees
// no key. One bit per row therefore describes the gaps.
#pragma once

#include <cstdint>

#include "attention/softmax.cuh"
#include "device/reduce.cuh"

namespace torchweld {

// The first `count` keys, in the form of a gap.
struct FirstKeys {
  int count;
  __device__ __forceinline__ bool may_overlap(int key, int) const { return key < count; }
  __device__ __forceinline__ bool contains(int key) const { return key < count; }
};

template <int kRows>
struct GapKeys {
  static_assert(kRows % kWarp == 0);
  int first_position;  // the key at the position of row 0, or kSeesNothing if there are no gaps
  // One bit per row. The bit is set if the key at the row's position is in a gap.
  uint32_t rows[kRows / kWarp];

  // Whether the `count` keys from `key` on may include keys of a gap.
  __device__ __forceinline__ bool may_overlap(int key, int count) const {
    return key + count > first_position;
  }
  __device__ __forceinline__ bool contains(int key) const {
    const int row = key - first_position;
    return row >= 0 && row < kRows && (rows[row / kWarp] >> row % kWarp & 1) != 0;
  }

  // Finds the gaps between the keys that the block's rows see. The position of row 0 is `position`.
  // `s_begin` holds the first key of each row, or kSeesNothing if the row sees no key. All keys
  // that the rows see lie in [first, end). The `threads` threads that call this function together
  // form whole warps. Before the call, first_position must be kSeesNothing or `position`.
  __device__ __forceinline__ void find(const int* s_begin, int position, int first, int end,
                                       int thread, int threads) {
    for (int row = thread; row < kRows; row += threads) {
      const int key = position + row;
      bool gap = s_begin[row] == kSeesNothing && key > first && key < end;
      if (__any_sync(~0u, gap)) gap &= first_begin_from(s_begin, row) > key;
      const uint32_t bits = __ballot_sync(~0u, gap);
      if (thread % kWarp != 0) continue;
      rows[row / kWarp] = bits;
      if (bits != 0) first_position = position;
    }
  }

 private:
  // Returns the minimum of s_begin over row `row` and all later rows. All lanes of a warp call this
  // function.
  static __device__ __forceinline__ int first_begin_from(const int* s_begin, int row) {
    int in_later_warps = kSeesNothing, begin = s_begin[row];
    for (int i = row + kWarp; i < kRows; i += kWarp) {
      in_later_warps = min(in_later_warps, s_begin[i]);
    }
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      begin = min(begin, __shfl_down_sync(~0u, begin, step));
    }
    return min(begin, __reduce_min_sync(~0u, in_later_warps));
  }
};

}  // namespace torchweld
