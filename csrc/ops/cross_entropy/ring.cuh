// Computes the loss and the gradient of long rows in a single read of the logits. A thread block
// cluster holds a whole row in shared memory (softmax/ring_rows.cuh). The kernel supports neither
// label smoothing nor the soft cap.
#pragma once

#include "device/features.cuh"
#include "ops/cross_entropy/loss_row.cuh"
#include "softmax/ring_rows.cuh"

namespace torchweld {

// The mask that tells the ring which columns of a row are live. An ignored row has no live columns.
// Therefore the ring neither loads nor computes an ignored row, and it sets the row's gradient to
// zero.
struct TargetMask {
  static constexpr bool kMasked = true, kCapped = false;
  CrossEntropyParams p;

  __device__ __forceinline__ KeyRange32 live_columns(int64_t row) const {
    return {0, has_target(p, p.targets[row]) ? static_cast<int>(p.n) : 0};
  }
};

#if TW_HAS_CLUSTERS
template <typename Config>
struct CrossEntropyRing : RingRows<Config, TargetMask> {
  using Base = RingRows<Config, TargetMask>;
  using Base::kCount;
  using Base::kElems;
  using Base::s;
  using T = typename Config::T;
  using Slice = typename Base::Slice;
  using Row = typename Base::Row;
  using Base::Base;

  __device__ __forceinline__ void compute() const {
    const CrossEntropyParams& all = this->mask.p;
    const LossExponent<T> exponent;
    Base::for_each_row([&](const Row& row) {
      const Slice& p = row.slice;
      MaxSum local = {-INFINITY, 0.f};
      Base::for_each_chunk(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return;
        float r_z[kCount];
        const float max =
            Base::template load_scores<full>(r_z, slot, p, done, all.inverse_temperature);
        accumulate(local, max, r_z, exponent);
      });
      const MaxSum found = s.s_exchange[Base::group()].merge(local, exponent, row.iteration);
      const bool live = p.end > 0;
      const int target = live ? static_cast<int>(all.targets[row.row]) : -1;
      RowGradient<float> gradient = {};
      float target_gradient = 0.f;
      if (live) {
        const float z_target = target_logit<T>(all, row.row, target);
        const auto statistics = row_statistics(all, found, 0.f, z_target);
        if (Base::rank == 0 && threadIdx.x % Config::kThreads == 0) {
          all.loss[row.row] = all.terms.loss(statistics);
          all.max[row.row] = statistics.max;
          all.log_sum[row.row] = statistics.log_sum;
        }
        gradient = row_gradient(all, row.row, statistics.max, statistics.log_sum);
        target_gradient = gradient.target * all.inverse_temperature;
      }
      const float factor = gradient.scale * all.inverse_temperature;
      Base::for_each_chunk_again(row, [&](auto full, int slot, int done) {
        if (!full && done + Base::first_access() >= p.accesses) return Base::release(slot);
        uint4 r_in[Config::kAccesses];
        Base::template load<full>(r_in, 0, slot, p, done);
        Base::release(slot);
#pragma unroll
        for (int i = 0; i < Config::kAccesses; ++i) {
          float r_d[kElems];
          Base::template convert<full>(r_d, r_in[i], p, done, i, all.inverse_temperature, 0.f);
#pragma unroll
          for (float& z : r_d) z = exponent(z, gradient.shift) * factor;
          const int to_target = target - p.column - (done + Base::access_of(i)) * kElems;
          if (to_target >= 0 && to_target < kElems) {
#pragma unroll
            for (int j = 0; j < kElems; ++j) {
              if (to_target == j) r_d[j] += target_gradient;
            }
          }
          Base::template store<full>(row, done, i, r_d);
        }
      });
    });
  }
};
#endif

// Clusters claim rows with the counter *g_claims, which must be 0 before the launch. The kernel
// resets *g_claims to 0 at the end. The number of clusters must not exceed the number of rows.
template <typename Config>
__global__ __launch_bounds__(Config::kBlockThreads, 1) void cross_entropy_ring_kernel(
    const RowArgs<typename Config::T> args, const TargetMask mask, unsigned* g_claims) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  run_ring(CrossEntropyRing<Config>(args, mask, *reinterpret_cast<RingShared<Config>*>(s_memory)),
           g_claims);
#endif
}

}  // namespace torchweld
