// The matmuls of one warp in fp16 and bf16: m16n8k16 with fp32 accumulators.
//
//   scores = Q K^T    Q (kTiles * 16, kDim), K (kKeys, kDim) in shared memory
//   out += P V        P (kTiles * 16, kKeys) in the registers of the scores, V (kKeys, kDim)
//
// `cols` is the number of columns that are not padding. This file does not use it, because skipping
// the padding columns would take longer than multiplying them.
#pragma once

#include "attention/tile.cuh"

namespace torchweld {

template <typename T, int kDim, int kTiles, int kKeys>
struct WarpMatmul16 {
  using Layout = AttentionLayout<T, kDim>;
  static constexpr bool kFtz = true;
  static constexpr int kRowBytes = Layout::kRowBytes;
  using Scores = float[kTiles][kKeys / 8][4];
  using Out = float[kTiles][kDim / 8][4];
  // The byte offsets of this lane's ldmatrix rows in the tiles of Q, K and V.
  uint32_t q_offset, k_offset, v_offset;

  __device__ __forceinline__ WarpMatmul16(int lane, int first_row) {
    const int low = lane % 16, high = lane / 16;
    q_offset = Layout::offset(first_row + low, high);
    k_offset = Layout::offset(high * 8 + lane % 8, lane / 8 % 2);
    v_offset = Layout::offset(low, high);
  }

  __device__ __forceinline__ void scores(Scores& r_s, const char* s_q, const char* s_k,
                                         int /*cols*/) const {
    const uint32_t q = shared_address(s_q) + q_offset, k = shared_address(s_k) + k_offset;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t r_q[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_matrix_4(r_q[tile], (q ^ (32 * d)) + tile * 16 * kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t r_k[4];
        load_matrix_4(r_k, (k ^ (32 * d)) + n * 16 * kRowBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          mma_16816<T>(r_s[tile][2 * n], r_q[tile], r_k[0], r_k[1]);
          mma_16816<T>(r_s[tile][2 * n + 1], r_q[tile], r_k[2], r_k[3]);
        }
      }
    }
  }

  // Computes out += P V. Two neighbouring score tiles in the layout of mma's C form one tile in the
  // layout of A.
  __device__ __forceinline__ void attend(Out& r_out, const Scores& r_p, const char* s_v,
                                         int /*cols*/) const {
    const uint32_t v = shared_address(s_v) + v_offset;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t r_a[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&p)[4] = r_p[tile][2 * k + i / 2];
          r_a[tile][i] = pack_pair<T>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t r_v[4];
        load_matrix_4_transposed(r_v, (v ^ (32 * n)) + k * 16 * kRowBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          mma_16816<T>(r_out[tile][2 * n], r_a[tile], r_v[0], r_v[1]);
          mma_16816<T>(r_out[tile][2 * n + 1], r_a[tile], r_v[2], r_v[3]);
        }
      }
    }
  }

  // Multiplies row `half` * 8 + lane / 4 of a result tile by `factor` and stores this row to shared
  // memory. If `live` is false, stores zeros instead.
  static __device__ __forceinline__ void stage(char* s_rows, const Out& r_out, int tile, int half,
                                               float factor, bool live) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float (&r)[4] = r_out[tile][n];
      const uint32_t pair = pack_pair<T>(r[2 * half] * factor, r[2 * half + 1] * factor);
      const uint32_t byte = Layout::offset(tile * 16 + half * 8 + g, n) + t * 4;
      *reinterpret_cast<uint32_t*>(s_rows + byte) = live ? pair : 0u;
    }
  }
};

}  // namespace torchweld
