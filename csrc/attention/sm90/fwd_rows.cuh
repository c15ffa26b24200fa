// What a consumer thread of attention's forward on Hopper has of its rows in registers, and what is
// multiplied there.
#pragma once

#include "attention/softmax.cuh"
#include "device/features.cuh"
#include "device/mma_sync.cuh"
#include "device/sm90/descriptor.h"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// What a thread of a consumer warpgroup has of its rows.
template <class Config>
struct AttentionSm90Rows {
  using T = typename Config::T;
  static constexpr int kKeys = Config::kKeys, kSlices = kKeys / 16;
  using Scores = float[1][kKeys / 8][4];
  using Out = float[1][Config::kDimV / 8][4];

  float score_sums[kKeys / 2];
  uint32_t probabilities[kSlices][4];
  float out_sums[Config::kDimV / 2];
  OnlineRow rows[1][2];
  float factor[1][2];
  bool live[2];

  __device__ __forceinline__ Scores& scores() { return reinterpret_cast<Scores&>(score_sums); }
  __device__ __forceinline__ Out& out() { return reinterpret_cast<Out&>(out_sums); }

  // scores = Q K^T
  __device__ __forceinline__ void multiply_keys(uint32_t s_query, uint32_t s_key) {
    const uint64_t a = k_major_descriptor(s_query), b = k_major_descriptor(s_key);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kDim / 16; ++slice) {
      const int stretch = slice / 4, at = slice % 4 * 32;
      Wgmma<T, kKeys>::template multiply<0, 0>(
          score_sums, a + ((stretch * Config::kQueryStretch + at) >> 4),
          b + ((stretch * Config::kKeyStretch + at) >> 4), slice > 0);
    }
    wgmma_commit();
  }

  // scores = a warp's 16 rows of a tile of scores
  __device__ __forceinline__ void read_scores(uint32_t s_scores, int row) {
    const int lane = threadIdx.x % 32, line = row + lane % 16;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int piece = slice % 4 * 2 + lane / 16;
      uint32_t words[4];
      load_matrix_4(words, s_scores + slice / 4 * Config::kScoreStretch + line * kSwizzleRowBytes +
                               swizzled_chunk(line, piece) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(words[i]);
        score_sums[slice * 8 + 2 * i] = pair.x;
        score_sums[slice * 8 + 2 * i + 1] = pair.y;
      }
    }
  }

  // out = (keeps ? out : 0) + P V
  __device__ __forceinline__ void multiply_values(uint32_t s_value, bool keeps) {
    const uint64_t b = mn_major_descriptor(s_value, Config::kKeyStretch);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Wgmma<T, Config::kDimV>::template multiply<1>(out_sums, probabilities[slice],
                                                    b + ((slice * 16 * kSwizzleRowBytes) >> 4),
                                                    slice > 0 || keeps);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void round_probabilities() {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        probabilities[slice][i] =
            pack_pair<T>(score_sums[slice * 8 + 2 * i], score_sums[slice * 8 + 2 * i + 1]);
      }
    }
  }
};
#endif

}  // namespace torchweld
