// The gradient of row softmax for long rows, one read of every row, which stays in shared memory:
// the rows of softmax/ring_rows.cuh, pieces of y and dy side by side, reduced to sum(y * dy).
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
  using Part = typename Base::Part;
  using Row = typename Base::Row;
  using Base::Base;

  // This thread's accesses of a piece.
  struct Piece {
    uint4 y[Config::kAccesses], dy[Config::kAccesses];
  };
  template <bool kFull>
  __device__ __forceinline__ Piece load(int slot, const Part& p, int done) const {
    Piece r_in;
    Base::template load<kFull>(r_in.y, 0, slot, p, done);
    Base::template load<kFull>(r_in.dy, 1, slot, p, done);
    return r_in;
  }

  // Access i in fp32; 0 where a column isn't live.
  template <bool kFull>
  __device__ __forceinline__ void widen(float (&r_y)[kElems], float (&r_dy)[kElems],
                                        const Piece& r_in, const Part& p, int done, int i) const {
    Base::template widen<kFull>(r_y, r_in.y[i], p, done, i, 1.f, 0.f);
    Base::template widen<kFull>(r_dy, r_in.dy[i], p, done, i, 1.f, 0.f);
  }

  __device__ __forceinline__ void compute() const {
    const float scale = this->mask.scale();
    Base::each_row([&](const Row& row) {
      const Part& p = row.part;
      float mine = 0.f;
      Base::each_piece(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return;
        const Piece r_in = load<full>(slot, p, done);
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          float r_y[kElems], r_dy[kElems];
          widen<full>(r_y, r_dy, r_in, p, done, i);
#pragma unroll
          for (int j = 0; j < kElems; ++j) mine += r_y[j] * r_dy[j];
        }
      });
      const float dot = s.s_exchange[Base::group()].sum(mine, row.turn);
      Base::each_piece_again(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return Base::give_back(slot);
        const Piece r_in = load<full>(slot, p, done);
        Base::give_back(slot);
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          float r_y[kElems], r_dy[kElems];
          widen<full>(r_y, r_dy, r_in, p, done, i);
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

// `g_claims` is 0 before and after the launch; there are no more clusters than rows.
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
