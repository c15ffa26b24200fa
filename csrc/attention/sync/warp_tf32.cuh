// The matmuls of one warp in TF32: m16n8k8 on fp32 tiles. The interface is the same as in
// attention/sync/warp_16bit.cuh.
//
// P V processes each group of 8 keys in the order 0 2 4 6 1 3 5 7. With this order, a thread that
// holds probabilities in the layout of mma's C already has them in the layout of mma's A. P V
// processes each group of 32 columns in the order 0 4 8 .. 28 1 5 .., so that a thread can load V
// 16 bytes at a time.
#pragma once

#include "attention/tile.cuh"

namespace torchweld {

template <int kDim, int kTiles, int kKeys>
struct WarpMatmulTf32 {
  using Layout = AttentionLayout<float, kDim>;
  static constexpr bool kFtz = false;
  static constexpr int kRowBytes = Layout::kRowBytes;
  using Scores = float[kTiles][kKeys / 8][4];
  using Out = float[kTiles][kDim / 8][4];
  uint32_t q_offset, k_offset, v_offset;

  __device__ __forceinline__ WarpMatmulTf32(int lane, int first_row) {
    const int g = lane / 4, t = lane % 4;
    q_offset = Layout::offset(first_row + lane % 16, lane / 16);
    k_offset = Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    v_offset = Layout::offset(2 * t, g);
  }

  static __device__ __forceinline__ uint32_t round(uint32_t bits) {
    return round_to_tf32(__uint_as_float(bits));
  }

  // ldmatrix loads an 8 x 8 matrix of 16-bit elements, which here is 8 x 4 fp32 values.
  __device__ __forceinline__ void scores(Scores& r_s, const char* s_q, const char* s_k,
                                         int cols) const {
    const uint32_t q = shared_address(s_q) + q_offset, k = shared_address(s_k) + k_offset;
#pragma unroll 1
    for (int d = 0; d * 8 < cols; ++d) {
      uint32_t r_q[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_matrix_4(r_q[tile], (q ^ (32 * d)) + tile * 16 * kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t r_k[4];
        load_matrix_4(r_k, (k ^ (32 * d)) + n * 16 * kRowBytes);
        const uint32_t b[4] = {round(r_k[0]), round(r_k[1]), round(r_k[2]), round(r_k[3])};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t (&r)[4] = r_q[tile];
          const uint32_t a[4] = {round(r[0]), round(r[1]), round(r[2]), round(r[3])};
          mma_1688(r_s[tile][2 * n], a, b[0], b[1]);
          mma_1688(r_s[tile][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void attend(Out& r_out, const Scores& r_p, const char* s_v,
                                         int cols) const {
#pragma unroll
    for (int k = 0; k < kKeys / 8; ++k) {
#pragma unroll
      for (int n = 0; n < kDim / 32; ++n) {
        if (n * 32 >= cols) break;
        const char* s_even = s_v + v_offset + k * 8 * kRowBytes + n * 8 * kVectorBytes;
        const char* s_odd =
            s_v + (v_offset ^ kVectorBytes) + (k * 8 + 1) * kRowBytes + n * 8 * kVectorBytes;
        const auto even = load_vec<float, 4>(reinterpret_cast<const float*>(s_even));
        const auto odd = load_vec<float, 4>(reinterpret_cast<const float*>(s_odd));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t b0 = round_to_tf32(even.values[i]), b1 = round_to_tf32(odd.values[i]);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const float (&p)[4] = r_p[tile][k];
            const uint32_t a[4] = {round_to_tf32(p[0]), round_to_tf32(p[2]), round_to_tf32(p[1]),
                                   round_to_tf32(p[3])};
            mma_1688(r_out[tile][4 * n + i], a, b0, b1);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void stage(char* s_rows, const Out& r_out, int tile, int half,
                                               float factor, bool live) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        Vec<float, 4> chunk;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = r_out[tile][4 * n + i][2 * half + odd] * factor;
          chunk.values[i] = live ? x : 0.f;
        }
        const uint32_t byte = Layout::offset(tile * 16 + half * 8 + g, n * 8 + 2 * t + odd);
        store_vec(reinterpret_cast<float*>(s_rows + byte), chunk);
      }
    }
  }
};

}  // namespace torchweld
