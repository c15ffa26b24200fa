// The backward of the softmax of long rows. A row stays in shared memory and is read only once
// (softmax/ring_rows.cuh). A slot holds a chunk of y and the same chunk of dy. Each row is reduced
// to sum(y * dy).
#pragma once

#include "device/features.cuh"
#include "softmax/ring_rows.cuh"

namespace torchweld {

#if TW_HAS_CLUSTERS
template <typename Config, typename Mask>
struct RingBackwardJob : RingRows<Config, Mask> {
  using Base = RingRows<Config, Mask>;
  using Base::kElems;
  using Base::s;
  using T = typename Config::T;
  using Slice = typename Base::Slice;
  using Row = typename Base::Row;
  using Base::Base;

  // The accesses to y and dy that a thread has loaded from a chunk.
  struct Chunk {
    uint4 y[Config::kAccesses], dy[Config::kAccesses];
  };
  template <bool kFull>
  __device__ __forceinline__ Chunk load(int slot, const Slice& p, int done) const {
    Chunk r_in;
    Base::template load<kFull>(r_in.y, 0, slot, p, done);
    Base::template load<kFull>(r_in.dy, 1, slot, p, done);
    return r_in;
  }

  // Converts the elements of y and dy of access i to fp32. Masked columns become 0.
  template <bool kFull>
  __device__ __forceinline__ void convert(float (&r_y)[kElems], float (&r_dy)[kElems],
                                          const Chunk& r_in, const Slice& p, int done,
                                          int i) const {
    Base::template convert<kFull>(r_y, r_in.y[i], p, done, i, 1.f, 0.f);
    Base::template convert<kFull>(r_dy, r_in.dy[i], p, done, i, 1.f, 0.f);
  }

  __device__ __forceinline__ void compute() const {
    const float scale = this->mask.scale();
    Base::for_each_row([&](const Row& row) {
      const Slice& p = row.slice;
      float local = 0.f;
      Base::for_each_chunk(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return;
        const Chunk r_in = load<full>(slot, p, done);
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          float r_y[kElems], r_dy[kElems];
          convert<full>(r_y, r_dy, r_in, p, done, i);
#pragma unroll
          for (int j = 0; j < kElems; ++j) local += r_y[j] * r_dy[j];
        }
      });
      const float dot = s.s_exchange[Base::group()].sum(local, row.iteration);
      Base::for_each_chunk_again(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return Base::release(slot);
        const Chunk r_in = load<full>(slot, p, done);
        Base::release(slot);
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          float r_y[kElems], r_dy[kElems];
          convert<full>(r_y, r_dy, r_in, p, done, i);
#pragma unroll
          for (int j = 0; j < kElems; ++j) {
            r_y[j] *= r_dy[j] - dot;
            if constexpr (Mask::kMasked) r_y[j] *= scale;
          }
          Base::template store<full>(row, done, i, r_y);
        }
      });
    });
  }
};
#endif

// *g_claims must be 0 before the launch, and the kernel leaves it at 0. The number of clusters must
// not exceed the number of rows.
template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kBlockThreads, 1) void softmax_ring_backward_kernel(
    const RowArgs<typename Config::T> args, const Mask mask, unsigned* g_claims) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<RingShared<Config>*>(s_memory);
  run_ring(RingBackwardJob<Config, Mask>(args, mask, s), g_claims);
#endif
}

}  // namespace torchweld
