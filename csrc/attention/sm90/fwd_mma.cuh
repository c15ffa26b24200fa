// Attention forward on Hopper: a consumer thread's registers, and the products Q K^T and P V.
#pragma once

#include "attention/softmax.cuh"
#include "device/features.cuh"
#include "device/mma_sync.cuh"
#include "device/sm90/descriptor.h"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The registers of a thread. S and O are wgmma accumulators of the warpgroup's 64 rows, and P is a
// wgmma operand. `rows` holds the maximum and the sum of each of the thread's two rows.
template <class Config>
struct AttentionSm90Registers {
  using T = typename Config::T;
  static constexpr int kKeys = Config::kKeys, kSlices = kKeys / 16;
  using Scores = float[1][kKeys / 8][4];
  using Out = float[1][Config::kDimV / 8][4];

  float acc_s[kKeys / 2];
  uint32_t p16[kSlices][4];
  float acc_o[Config::kDimV / 2];
  OnlineRow rows[1][2];
  float o_scale[1][2];  // per row: factor that rescales O if the maximum rises; at the end 1 / sum
  bool live[2];         // per row: whether the row sees a key

  __device__ __forceinline__ Scores& scores() { return reinterpret_cast<Scores&>(acc_s); }
  __device__ __forceinline__ Out& out() { return reinterpret_cast<Out&>(acc_o); }

  // Issue S = Q K^T.
  __device__ __forceinline__ void mma_s(uint32_t s_query, uint32_t s_key) {
    const uint64_t q_desc = k_major_descriptor(s_query), k_desc = k_major_descriptor(s_key);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kDim / 16; ++slice) {
      const int box = slice / 4, in_row = slice % 4 * 32;
      Wgmma<T, kKeys>::template multiply<0, 0>(
          acc_s, q_desc + ((box * Config::kQueryBoxBytes + in_row) >> 4),
          k_desc + ((box * Config::kKeyBoxBytes + in_row) >> 4), slice > 0);
    }
    wgmma_commit();
  }

  // Load S of the warp's 16 rows from a tile of scores in shared memory. The rows start at row
  // `row` of the tile.
  __device__ __forceinline__ void load_s(uint32_t s_scores, int row) {
    for_scores<Config::kScoreBoxBytes>(s_scores, row, [](float& to, float score) { to = score; });
  }
  // Add a tile of the bias times `factor` to S. The warp's 16 rows start at row `row` of the tile.
  __device__ __forceinline__ void add_bias(uint32_t s_bias, int row, float factor) {
    for_scores<Config::kBiasBoxBytes>(
        s_bias, row, [&](float& score, float bias) { score = fmaf(bias, factor, score); });
  }
  // Add one row of the bias to all rows in the same way. The row has `keys` elements from g_row on,
  // which is aligned to two elements.
  __device__ __forceinline__ void add_bias_row(const T* g_row, int keys, float factor) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const uint32_t word =
          j * 8 + column < keys ? *reinterpret_cast<const uint32_t*>(g_row + j * 8 + column) : 0;
      const float2 pair = unpack_pair<T>(word);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = acc_s[j * 4 + i];
        score = fmaf(i % 2 ? pair.y : pair.x, factor, score);
      }
    }
  }
  // Add factor * distance to S, or -|factor * distance| if `crosses` is true, except for what
  // `offsets` receives: the caller adds it to all scores of a row. The distance of a score is its
  // key minus the position of its row. `distance` is that of the thread's first score.
  __device__ __forceinline__ void add_alibi(float factor, int distance, bool crosses,
                                            float (&offsets)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offsets[half] = factor * static_cast<float>(distance - half * 8);
    }
    const auto for_columns = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        body(acc_s[i], static_cast<float>(i / 4 * 8 + i % 2), offsets[i / 2 % 2]);
      }
    };
    if (crosses) {
      for_columns([&](float& score, float column, float offset) {
        score -= fabsf(fmaf(factor, column, offset));
      });
      offsets[0] = offsets[1] = 0.f;
    } else {
      for_columns([&](float& score, float column, float) {
        if (column != 0.f) score = fmaf(factor, column, score);
      });
    }
  }
  // Call body(score, element) for each score of the thread and the element of a tile in shared
  // memory at its place. The warp's 16 rows start at row `row` of the tile.
  template <int kBoxBytes, typename Body>
  __device__ __forceinline__ void for_scores(uint32_t s_tile, int row, const Body& body) {
    const int lane = threadIdx.x % 32, lane_row = row + lane % 16;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int chunk = slice % 4 * 2 + lane / 16;
      uint32_t words[4];
      load_matrix_4(words, s_tile + slice / 4 * kBoxBytes + lane_row * kSwizzleRowBytes +
                               swizzled_chunk(lane_row, chunk) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(words[i]);
        body(acc_s[slice * 8 + 2 * i], pair.x);
        body(acc_s[slice * 8 + 2 * i + 1], pair.y);
      }
    }
  }

  // Issue O = (scale_d ? O : 0) + P V.
  __device__ __forceinline__ void mma_o(uint32_t s_value, bool scale_d) {
    const uint64_t v_desc = mn_major_descriptor(s_value, Config::kKeyBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Wgmma<T, Config::kDimV>::template multiply<1>(
          acc_o, p16[slice], v_desc + ((slice * 16 * kSwizzleRowBytes) >> 4), slice > 0 || scale_d);
    }
    wgmma_commit();
  }

  // Round P to 16 bits: the accumulators of S become the register operand of O += P V.
  __device__ __forceinline__ void convert_p() {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p16[slice][i] = pack_pair<T>(acc_s[slice * 8 + 2 * i], acc_s[slice * 8 + 2 * i + 1]);
      }
    }
  }
};
#endif

}  // namespace torchweld
