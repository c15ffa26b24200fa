// The matmul epilogue that computes exponentials from the accumulators. It stores y = 2^(l - k) in
// bf16. For each row of a tile, it also stores the fp32 sum of the exponentials over the tile's
// columns. The exponentials are added before they are rounded to bf16.
#pragma once

#include "gemm/sm90/kernel.cuh"
#include "losses/sm90/params.h"
#include "losses/sm90/softcap.cuh"

namespace torchweld::sm90 {

#if TW_HAS_WGMMA
template <int kTile, bool kCapped, bool kMoment>
class ExponentialsEpilogue {
  using Store = BoxStore<__nv_bfloat16, kTile, /*kGated=*/false>;
  using Place = typename Store::Place;
  using Values = typename Store::Values;
  static constexpr Tile kT = kTiles[kTile];
  static constexpr int kMTiles = kT.wgmma_m_tiles(), kBoxes = Store::kAcross;

 public:
  using Sums = typename Store::Sums;

  __device__ __forceinline__
  ExponentialsEpilogue(const ExponentialsKernelParams<kCapped, kMoment>& p, char* s_staging,
                       float* s_bias, int warpgroup)
      : p_(p.gemm),
        e_(p.exponentials),
        bias_(p.gemm, s_bias),
        store_(p, s_staging, warpgroup),
        lane_(threadIdx.x % 32) {}

  // Loads the bias, and the reference exponents of this thread's rows. The loads run during the
  // mainloop.
  __device__ __forceinline__ void fetch(const WorkTile& work, int rank, bool ends) {
    if (bias_.given() && ends) bias_.fetch(work);
    const int row = Store::place_of(work, rank).row + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + i * 64 + half * 8;
        reference_[i][half] = at < p_.m ? e_.reference[at] : INFINITY;
      }
    }
  }

  __device__ __forceinline__ void finish(Sums& acc, const WorkTile& work, int rank, int warpgroup) {
    if (bias_.given()) bias_.share(warpgroup);
    const Place place = Store::place_of(work, rank);
    int result = 0;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      auto& v = acc[i];
      if (bias_.given()) {
#pragma unroll
        for (int c = 0; c < kBoxes; ++c) bias_.add(box_values(v, c), c * Store::kColumns);
      }
      if constexpr (kCapped) cap(v);
      if (place.column + kT.block_n > p_.n) hide_columns(v, place.column);
      finish_rows(v, reference_[i], place, i, int(work.tile_n), result);
    }
    if (p_.y != nullptr) store_.template send_final_box<false>(place, result);
  }

  __device__ __forceinline__ void wait() const { store_.wait(); }

 private:
  const GemmParams& p_;
  const ExponentialsParams& e_;
  TileBias<__nv_bfloat16, kTile, false> bias_;
  Store store_;
  int lane_;
  float reference_[kMTiles][2];

  // The accumulators of a thread in rows g and g + 8. v[4 * i] and v[4 * i + 1] are two
  // neighbouring columns of row g. v[4 * i + 2] and v[4 * i + 3] are the same columns of row g + 8.
  using RowValues = float[kT.block_n / 2];

  static __device__ __forceinline__ Values& box_values(RowValues& v, int box) {
    return reinterpret_cast<Values&>(v[box * Store::kValues]);
  }

  __device__ __forceinline__ void cap(RowValues& v) const {
#pragma unroll
    for (int j = 0; j < kT.block_n / 2; ++j) {
      v[j] = capped_logit(v[j], e_.softcap, e_.inverse_softcap);
    }
  }

  // Sets the values of columns from gemm.n on to -inf, so that their exponentials are 0.
  __device__ __forceinline__ void hide_columns(RowValues& v, int column) const {
#pragma unroll
    for (int j = 0; j < kT.block_n / 2; ++j) {
      const int at = column + j / 4 * 8 + lane_ % 4 * 2 + j % 2;
      if (at >= p_.n) v[j] = -INFINITY;
    }
  }

  __device__ __forceinline__ void finish_rows(RowValues& v, const float (&reference)[2],
                                              const Place& place, int m_tile, int tile_n,
                                              int& result) {
    // NOTE: the moments are added relative to the tile's largest l, where the terms that count are
    // small. Relative to k, each addition would round at the size of k.
    float k[2], largest[2], sum[2] = {0.f, 0.f}, moment[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = -INFINITY;
#pragma unroll
      for (int j = 0; j < kT.block_n / 8; ++j) {
        max = fmaxf(max, fmaxf(v[4 * j + 2 * half], v[4 * j + 2 * half + 1]));
      }
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      max *= e_.scale;
      // NOTE: if the reference is NaN, the comparison is false, and the tile chooses another
      // reference for the row.
      k[half] = max <= reference[half] + kMaxAboveReference ? reference[half]
                : max == -INFINITY                          ? 0.f
                                                            : rintf(max);
      largest[half] = fabsf(max) < INFINITY ? rintf(max) - k[half] : 0.f;
    }
    // NOTE: the exponentials of an ignored row become 0 here, even if the row contains NaN.
    const bool ignores = __any_sync(~0u, reference[0] == INFINITY || reference[1] == INFINITY);
    if (ignores) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (reference[half] != INFINITY) continue;
        k[half] = 0.f;
#pragma unroll
        for (int j = 0; j < kT.block_n / 8; ++j) {
          v[4 * j + 2 * half] = v[4 * j + 2 * half + 1] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kBoxes; ++c) {
      auto& box = box_values(v, c);
#pragma unroll
      for (int j = 0; j < Store::kValues; ++j) {
        const int half = j / 2 % 2;
        const float z = box[j], l = fmaf(z, e_.scale, -k[half]);
        float y = exp2_approx_ftz(l);
        sum[half] += y;
        if (kMoment && y > 0.f) moment[half] = fmaf(y, l - largest[half], moment[half]);
        if constexpr (kCapped) {
          const float t = z * e_.inverse_softcap;
          if (y > 0.f) y *= fmaf(-t, t, 1.f);
        }
        box[j] = y;
      }
      if (p_.y != nullptr) store_.stage(box, store_.template send_last_box<false>(place, result));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if constexpr (kMoment) {
        moment[half] += __shfl_xor_sync(~0u, moment[half], 1);
        moment[half] += __shfl_xor_sync(~0u, moment[half], 2);
      }
      const int64_t row = place.row + m_tile * 64 + half * 8 + lane_ / 4;
      if (lane_ % 4 != 0 || row >= p_.m) continue;
      const int64_t at = tile_n * p_.m + row;
      e_.tile_reference[at] = k[half];
      e_.tile_sum[at] = sum[half];
      if constexpr (kMoment) {
        e_.tile_moment[at] = fmaf(sum[half], largest[half] + kAboveTarget, moment[half]);
      }
    }
  }
};

template <class Config, bool kCapped, bool kMoment>
struct EpilogueOf<Config, ExponentialsKernelParams<kCapped, kMoment>> {
  using Type = ExponentialsEpilogue<Config::kTile, kCapped, kMoment>;
};
#endif

}  // namespace torchweld::sm90
