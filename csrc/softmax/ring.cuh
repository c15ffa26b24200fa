// The softmax of long rows. Each row is reduced to (max, sum). The shared memory of a cluster holds
// the row, so that it is read from global memory only once. If a row is longer than the ring, its
// first chunks are read twice (softmax/ring_rows.cuh).
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (for merging
// two partial results).
#pragma once

#include "device/features.cuh"
#include "softmax/ring_rows.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
template <typename Config, typename Mask>
struct RingJob : RingRows<Config, Mask> {
  using Base = RingRows<Config, Mask>;
  using Base::kCount;
  using Base::kElems;
  using Base::s;
  using T = typename Config::T;
  using Slice = typename Base::Slice;
  using Row = typename Base::Row;
  using Base::Base;

  __device__ __forceinline__ void compute() const {
    const Exponent<T> exponent(this->mask.scale());
    Base::for_each_row([&](const Row& row) {
      const Slice& p = row.slice;
      MaxSum local = {-INFINITY, 0.f};
      Base::for_each_chunk(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return;
        float r_x[kCount];
        const float max = Base::template load_scores<full>(r_x, slot, p, done, exponent.sign);
        accumulate(local, max, r_x, exponent);
      });
      const MaxSum total = s.s_exchange[Base::group()].merge(local, exponent, row.iteration);
      const float factor = 1.f / total.sum;
      Base::for_each_chunk_again(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return Base::release(slot);
        float r_x[kCount];
        Base::template load_scores<full>(r_x, slot, p, done, exponent.sign);
        Base::release(slot);
#pragma unroll
        for (float& x : r_x) x = exponent(x, total.max) * factor;
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          Base::template store<full>(row, done, i, r_x + i * kElems);
        }
      });
    });
  }
};
#endif

// *g_claims must be 0 before the launch, and the kernel leaves it at 0. The number of clusters must
// not exceed the number of rows.
template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kBlockThreads,
                             1) void softmax_ring_kernel(const RowArgs<typename Config::T> args,
                                                         const Mask mask, unsigned* g_claims) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  run_ring(RingJob<Config, Mask>(args, mask, *reinterpret_cast<RingShared<Config>*>(s_memory)),
           g_claims);
#endif
}

}  // namespace torchweld
