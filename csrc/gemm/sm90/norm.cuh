// A norm of a's rows by the kernel that multiplies them: warps that have nothing else to do write
// the normalised rows, in the order in which the tiles want them, and the producer waits for those
// of its tile. So the norm takes the time of the first tiles' rows alone; the rest of it runs
// beside the products.
//
// A warp claims one row after the other, and waits for nobody while it has one. Whoever waits for a
// row so waits for a warp that runs, whichever blocks run at a time.
#pragma once

#include "device/named_barrier.cuh"
#include "device/pair_sum.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "gemm/sm90/params.h"
#include "norm/statistics.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <class Config>
class Sm90NormRows {
  using T = typename Config::T;
  static constexpr int kRows = Config::kT.block_m;  // whose readiness is counted together
  static constexpr int kVec = 16 / sizeof(T);

 public:
  explicit __device__ __forceinline__ Sm90NormRows(const Sm90Params& p) : p_(p) {}

  // By whole warps before they multiply: rows that the first tiles want.
  __device__ __forceinline__ void begin() const {
    constexpr uint32_t kWarps = Sm90Tile::kThreads / 32 - 1;  // of a block, without the producer
    const uint32_t at_a_time = gridDim.x * kWarps;
    // Some warp will claim it.
    const uint32_t wanted = blockIdx.x * kWarps + threadIdx.x / 32 - 1;
    if (wanted < p_.norm.first_rows) prefetch(wanted);
    while (true) {
      const uint32_t row = broadcast(claim());
      if (row >= p_.gemm.m) break;
      normalise<4>(row);
      if (row + at_a_time >= p_.norm.first_rows) break;
    }
  }

  // By whole warps: rows, until all are claimed.
  __device__ __forceinline__ void run() const {
    uint32_t next = claim(), later = claim();
    while (true) {
      const uint32_t row = broadcast(next);
      if (row >= p_.gemm.m) break;
      next = later;
      later = claim();  // on its way meanwhile, as is the next row
      prefetch(broadcast(next));
      normalise<2>(row);
    }
  }

  // By one thread: rows [first, first + kRows) are there for the copy engine.
  __device__ __forceinline__ void wait(int64_t first) const {
    if (first >= p_.gemm.m) return;
    const uint32_t expected = uint32_t(min(p_.gemm.m - first, int64_t{kRows}));
    const uint32_t* g_ready = ready(first);
    uint32_t count;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(g_ready) : "memory");
    } while (count != expected);
    global_async_fence();
  }

  // By one warp of every block, once the block is through with the counters; the last one leaves
  // them zero.
  __device__ __forceinline__ void end() const {
    uint32_t blocks = 0;
    if (lane() == 0) blocks = atomicAdd(&p_.norm.counters[1], 1u);
    if (broadcast(blocks) + 1 != gridDim.x) return;
    const int64_t counters = Sm90Norm::kCounters + (p_.gemm.m + kRows - 1) / kRows;
    for (int64_t i = lane(); i < counters; i += 32) p_.norm.counters[i] = 0;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ uint32_t broadcast(uint32_t x) {
    return __shfl_sync(~0u, x, 0);
  }
  __device__ __forceinline__ uint32_t* ready(int64_t row) const {
    return p_.norm.counters + Sm90Norm::kCounters + row / kRows;
  }
  // The first lane's.
  __device__ __forceinline__ uint32_t claim() const {
    return lane() == 0 ? atomicAdd(&p_.norm.counters[0], 1u) : 0;
  }

  __device__ __forceinline__ const T* row_of_x(int64_t row) const {
    return static_cast<const T*>(p_.norm.x) + row * p_.norm.x_row_stride;
  }
  // Into L2, as much as the lanes ask for at once.
  __device__ __forceinline__ void prefetch(uint32_t row) const {
    const int column = lane() * (128 / int(sizeof(T)));
    if (row < p_.gemm.m && column < p_.gemm.k) prefetch_line(row_of_x(row) + column);
  }

  // Calls body(column, its 16 bytes).
  template <int kUnroll, typename Body>
  __device__ __forceinline__ void for_each_piece(const T* g_row, const Body& body) const {
    const int columns = int(p_.gemm.k);
#pragma unroll kUnroll
    for (int column = lane() * kVec; column < columns; column += 32 * kVec) {
      body(column, load_vec<T, kVec>(g_row + column));
    }
  }

  // NOTE: the row is read three times; two of them find it in L1.
  template <int kUnroll>
  __device__ __forceinline__ void normalise(int64_t row) const {
    const GemmNorm& norm = p_.gemm.norm;
    const int64_t n = p_.gemm.k;
    const T* g_x = row_of_x(row);
    float first_mean = 0.f;
    if (norm.centred) {
      for_each_piece<kUnroll>(g_x, [&](int, const Vec<T, kVec>& x) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) first_mean += to_float(x.values[j]);
      });
      first_mean = warp_sum(first_mean) / static_cast<float>(n);
    }
    float2 sums = {0.f, 0.f};
    for_each_piece<kUnroll>(g_x, [&](int, const Vec<T, kVec>& x) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float d = to_float(x.values[j]) - first_mean;
        sums.x += d;
        sums.y += d * d;
      }
    });
    const RowNormaliser statistics =
        finish_statistics(n, norm.eps, norm.centred, first_mean, warp_sum(sums));
    T* g_y = static_cast<T*>(p_.gemm.written) + row * n;
    for_each_piece<kUnroll>(g_x, [&](int column, const Vec<T, kVec>& x) {
      store_normalised(norm.scale, norm.shift, g_y, column, x, statistics);
    });
    global_async_fence();
    __syncwarp();
    if (lane() == 0) {
      if (norm.mean != nullptr) norm.mean[row] = statistics.mean();
      if (norm.rstd != nullptr) norm.rstd[row] = statistics.rstd;
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready(row)) : "memory");
    }
  }

  const Sm90Params& p_;
};
#endif

}  // namespace torchweld
