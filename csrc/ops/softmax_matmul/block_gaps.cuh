// Gaps in a block of softmax_matmul's forward. A gap is a range of keys that no row of the block
// sees, with seen keys before and after it. In shared memory, the block sets the rows of value in
// gaps to 0.
#pragma once

#include "attention/gap_keys.cuh"
#include "ops/softmax_matmul/parts.cuh"

namespace torchweld {

// The gaps of a block under a general mask. Key indices count from the position of the block's
// first row, because absolute key indices may not fit in 32 bits.
template <typename Config>
struct BlockGaps {
  GapKeys<Config::kBlockM> gaps;
  int begin[Config::kBlockM];

  static __device__ __forceinline__ int count(int64_t key, int64_t position) {
    return clamp_int(key - position, -(1 << 30), 1 << 30);
  }

  // Finds the gaps. `seen` has the ranges of keys that the rows of the block see. All threads of
  // the block call this function.
  __device__ __forceinline__ void find(const TileMask& seen, int64_t position) {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const KeyRange keys = seen.rows[i];
      if (lane % 4 != 0) continue;
      begin[row + 8 * i] = keys.empty() ? kSeesNothing : count(keys.begin, position);
    }
    if (threadIdx.x == 0) gaps.first_position = kSeesNothing;
    __syncthreads();
    gaps.find(begin, 0, count(seen.any.begin, position), count(seen.any.end, position), threadIdx.x,
              Config::kThreads);
    __syncthreads();
  }

  // Sets rows of a tile of value to 0 if they are in a gap. The tile starts at `key`. All threads
  // of the block call this function.
  __device__ __forceinline__ void clear(typename Config::T* s_value, int64_t key,
                                        int64_t position) const {
    const int first = count(key, position);
    if (!gaps.may_overlap(first, Config::kBlockN)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::kBlockN * Config::kBlockD; i += Config::kThreads) {
      const int row = i / Config::kBlockD;
      if (!gaps.contains(first + row)) continue;
      s_value[row * Config::kValuePitch + i % Config::kBlockD] =
          from_float<typename Config::T>(0.f);
    }
    __syncthreads();
  }
};

}  // namespace torchweld
