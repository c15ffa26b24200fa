// An exclusive sum over many values by one block, and a search in such sums.
#pragma once

namespace torchweld {

// Calls body(i, value(i), the sum of value(0) to value(i - 1)) for every i < count. Returns the sum
// of all values. All threads of the block must call this function. s_warps has one int per warp.
template <typename Value, typename Body>
__device__ __forceinline__ int block_scan(int count, int* s_warps, const Value& value,
                                          const Body& body) {
  const int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += threads) {
    const int i = first + int(threadIdx.x), own = i < count ? value(i) : 0;
    int sum = own;  // of this and the lower lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) s_warps[warp] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp) sum += s_warps[w];
      all += s_warps[w];
    }
    if (i < count) body(i, own, before + sum - own);
    before += all;
    __syncthreads();
  }
  return before;
}

// Returns the last i < count with first(i) <= at. `first` ascends, and first(0) <= at.
template <typename First>
__device__ __forceinline__ int last_at_or_before(int count, int at, const First& first) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first(middle) <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace torchweld
