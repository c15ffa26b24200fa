// The epilogue of a swap_ab tile. The rows of such a tile are columns of y. The results are stored
// one element at a time, because y has few rows and therefore few elements.
#pragma once

#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/vec.cuh"
#include "gemm/linear_epilogue.cuh"
#include "gemm/sm90/named_barriers.h"
#include "gemm/sm90/params.h"
#include "gemm/sm90/tiles.h"

namespace torchweld::sm90 {

#if TW_HAS_WGMMA
// A warp holds 16 columns of y. With g = lane / 4 and t = lane % 4, a thread holds two of these
// columns, g and g + 8, in rows 2t and 2t + 1 of every group of 8 rows. In a gated tile the first
// warpgroup holds the left values, and the second warpgroup holds the right values. The first
// warpgroup receives the right values and applies the gate. If a cluster splits the K of the tile,
// each CTA stores only its output slice.
template <typename T, int kTile, bool kGated_, class Work = WorkTile>
class SwapAbEpilogue {
  static constexpr bool kGated = kGated_;
  static constexpr Tile kT = kTiles[kTile];
  static constexpr int kValues = kT.block_n / 2;  // the number of accumulators of one thread
  static constexpr int kConsumerThreads = Tile::kConsumerThreads;

 public:
  using Sums = float[1][kValues];

  // s_staging is shared memory with space for the values of 128 threads. A gated tile uses it to
  // pass the right values to the first warpgroup.
  __device__ __forceinline__ SwapAbEpilogue(const KernelParams& p, char* s_staging, float*,
                                            int warpgroup)
      : p_(p.gemm), s_right_(reinterpret_cast<float*>(s_staging)), warpgroup_(warpgroup) {
    if (kGated && warpgroup == 0) named_barrier_arrive(kSwapAbRightEmpty, kConsumerThreads);
  }

  __device__ __forceinline__ void fetch(const Work&, int, bool) const {}

  __device__ __forceinline__ void set_output_slice(OutputSlice slice) { slice_ = slice; }

  __device__ __forceinline__ void finish(Sums& acc, const Work& work, int, int) const {
    // The number of columns of y in a tile.
    constexpr int kColumns = kGated ? kT.block_m / 2 : kT.block_m;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int64_t first =
        work.tile_m * kColumns + (kGated ? 0 : warpgroup_ * 64) + thread / 32 * 16 + lane / 4;
    const int64_t row = work.first_column_of(1, 0, kT.block_n) + lane % 4 * 2;
    linear_epilogue</*kExact=*/false>(
        p_.epilogue, Fragment{*this, row, work.rows_end(p_), first, work.batch, acc[0]});
  }

  __device__ __forceinline__ void wait() const {}

 private:
  // The values of a thread. The first one is element (row, first) of y.
  struct Fragment {
    static constexpr bool kGated = kGated_, kActivates = true;
    const SwapAbEpilogue& store_;
    int64_t row, rows_end, first, batch;
    float (&values)[kValues];
    float partner[kGated ? kValues : 1];

    __device__ __forceinline__ bool stores_preact() const {
      return store_.p_.epilogue.preact != nullptr;
    }
    __device__ __forceinline__ void add_bias() {
      store_.add_bias(values, first, kGated ? store_.warpgroup_ : 0, batch);
    }
    __device__ __forceinline__ void store_preact() {
      store_.store_preact(values, row, rows_end, first, batch);
    }
    // The second warpgroup passes the right values to the first one.
    __device__ __forceinline__ bool pair_up() {
      const int thread = threadIdx.x % 128;
      if (store_.warpgroup_ == 1) {
        named_barrier_wait(kSwapAbRightEmpty, kConsumerThreads);
#pragma unroll
        for (int i = 0; i < kValues; ++i) store_.s_right_[i * 128 + thread] = values[i];
        named_barrier_arrive(kSwapAbRightFull, kConsumerThreads);
        return false;
      }
      named_barrier_wait(kSwapAbRightFull, kConsumerThreads);
#pragma unroll
      for (int i = 0; i < kValues; ++i) partner[i] = store_.s_right_[i * 128 + thread];
      named_barrier_arrive(kSwapAbRightEmpty, kConsumerThreads);
      return true;
    }
    __device__ __forceinline__ void store() {
      const GemmParams& p = store_.p_;
      T* g_y = static_cast<T*>(p.y) + batch * p.y_batch_stride;
      store_.store(values, row, rows_end, first,
                   [&](int64_t r, int64_t c) { return g_y + r * p.y_row_stride + c; });
    }
  };

  __device__ __forceinline__ void add_bias(float (&v)[kValues], int64_t first, int right,
                                           int64_t batch) const {
    const GemmEpilogue& e = p_.epilogue;
    float bias[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t column = first + half * 8;
      if (column >= p_.n) continue;
      int64_t from = !kGated ? column : e.interleaved ? 2 * column + right : column + right * p_.n;
      if constexpr (Work::kGrouped) from += batch * (kGated ? 2 * p_.n : p_.n);
      bias[half] = e.bias_fp32 ? static_cast<const float*>(e.bias)[from]
                               : to_float(static_cast<const T*>(e.bias)[from]);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] += bias[i / 2 % 2];
  }

  __device__ __forceinline__ void store_preact(const float (&v)[kValues], int64_t row,
                                               int64_t rows_end, int64_t first,
                                               int64_t batch) const {
    T* g_preact = static_cast<T*>(p_.epilogue.preact) + batch * p_.y_batch_stride;
    const int64_t width = kGated ? 2 * p_.n : p_.n, right = kGated ? warpgroup_ : 0;
    const bool pairs = kGated && p_.epilogue.interleaved;
    store(v, row, rows_end, first, [&](int64_t r, int64_t c) {
      return g_preact + r * width + (pairs ? 2 * c + right : c + right * p_.n);
    });
  }

  // Stores the values of this CTA's output slice. at(row, column) returns the address of an
  // element.
  template <typename At>
  __device__ __forceinline__ void store(const float (&v)[kValues], int64_t row, int64_t rows_end,
                                        int64_t first, const At& at) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int64_t r = row + i / 4 * 8 + i % 2, c = first + i / 2 % 2 * 8;
      const bool own = unsigned(i - slice_.first) < unsigned(slice_.count);
      if (own && r < rows_end && c < p_.n) *at(r, c) = from_float<T>(v[i]);
    }
  }

  const GemmParams& p_;
  float* s_right_;
  int warpgroup_;
  OutputSlice slice_ = {0, kValues};
};
#endif

}  // namespace torchweld::sm90
