// The matmuls of one warp in fp32, to its accuracy (kExact) or in one pass of m16n8k8 TF32. The
// interface is that of attention_warp16.cuh.
//
// Exact scores come from bf16 pieces, which keep every product: an error in a score of 1000 counts
// as e^1000 does. P V, where P is at most 1, takes TF32 in four passes.
//
// P V takes the keys of every 8 in the order 0 2 4 6 1 3 5 7, which makes C's layout of the scores
// A's of P, and the columns of every 32 in the order 0 4 8 .. 28 1 5 .., so that a thread reads
// V 16 bytes at a time.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.
#pragma once

#include <type_traits>

#include "ops/attention/attention_tile.cuh"

namespace torchweld {

struct RoundedTf32 {
  uint32_t big;
  __device__ __forceinline__ explicit RoundedTf32(float x) : big(round_to_tf32(x)) {}
};

// SplitTf32 for what is never infinite.
struct SplitProbability {
  uint32_t big, small;
  __device__ __forceinline__ explicit SplitProbability(float x) {
    big = round_to_tf32(x);
    small = round_to_tf32(x - __uint_as_float(big));
  }
};

// SplitTf32 and the last bit of x: a probability of 1 gives the value itself.
struct SplitValue : SplitTf32 {
  uint32_t rest;
  __device__ __forceinline__ explicit SplitValue(float x) : SplitTf32(x) {
    const float left = x - __uint_as_float(big) - __uint_as_float(small);
    rest = left == left ? __float_as_uint(left) : 0u;
  }
};

__device__ __forceinline__ uint32_t cross_of(const SplitTf32& x) { return x.cross; }
__device__ __forceinline__ uint32_t cross_of(const SplitProbability& x) { return x.big; }

// d += a @ b for one m16n8k8 tile.
// NOTE: tensor cores truncate when they accumulate. In three passes the running sum takes part in
// an ordinary addition instead, which rounds.
template <typename A, typename B>
__device__ __forceinline__ void mma_tf32(float (&d)[4], const A (&a)[4], const B& b0, const B& b1) {
  if constexpr (std::is_same_v<A, RoundedTf32>) {
    mma_1688(d, {a[0].big, a[1].big, a[2].big, a[3].big}, b0.big, b1.big);
  } else {
    float r[4] = {};
    if constexpr (std::is_same_v<B, SplitValue>) {
      mma_1688(r, {a[0].big, a[1].big, a[2].big, a[3].big}, b0.rest, b1.rest);
    }
    mma_1688(r, {cross_of(a[0]), cross_of(a[1]), cross_of(a[2]), cross_of(a[3])}, b0.small,
             b1.small);
    mma_1688(r, {a[0].small, a[1].small, a[2].small, a[3].small}, b0.cross, b1.cross);
    mma_1688(r, {a[0].big, a[1].big, a[2].big, a[3].big}, b0.big, b1.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += r[i];
  }
}

template <bool kExact, int kDim, int kTiles, int kKeys>
struct WarpMatmul32 {
  using Layout = AttentionLayout<float, kDim>;
  using Operand = std::conditional_t<kExact, SplitTf32, RoundedTf32>;
  using Weight = std::conditional_t<kExact, SplitProbability, RoundedTf32>;
  using Value = std::conditional_t<kExact, SplitValue, RoundedTf32>;
  static constexpr bool kFtz = false;
  static constexpr int kRowBytes = Layout::kRowBytes;
  using Scores = float[kTiles][kKeys / 8][4];
  using Out = float[kTiles][kDim / 8][4];
  uint32_t q_offset, k_offset, v_offset;

  __device__ __forceinline__ WarpMatmul32(int lane, int first_row) {
    const int g = lane / 4, t = lane % 4;
    q_offset = Layout::offset(first_row + lane % 16, lane / 16);
    k_offset = Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    v_offset = Layout::offset(2 * t, g);
  }

  static __device__ __forceinline__ Operand operand(uint32_t bits) {
    return Operand(__uint_as_float(bits));
  }

  // An 8 x 8 matrix of 16-bit elements is one of 8 x 4 fp32 values to ldmatrix.
  __device__ __forceinline__ void scores(Scores& r_s, const char* s_q, const char* s_k,
                                         int cols) const {
    const uint32_t q = shared_address(s_q) + q_offset, k = shared_address(s_k) + k_offset;
    if constexpr (kExact) {
      exact_scores(r_s, q, k, cols);
    } else {
      rounded_scores(r_s, q, k, cols);
    }
  }

  static __device__ __forceinline__ void rounded_scores(Scores& r_s, uint32_t q, uint32_t k,
                                                        int cols) {
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
        const Operand b[4] = {operand(r_k[0]), operand(r_k[1]), operand(r_k[2]), operand(r_k[3])};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t (&r)[4] = r_q[tile];
          const Operand a[4] = {operand(r[0]), operand(r[1]), operand(r[2]), operand(r[3])};
          mma_tf32(r_s[tile][2 * n], a, b[0], b[1]);
          mma_tf32(r_s[tile][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Depths t and t + 4 of every 8 are taken as 2t and 2t + 1, of Q and K alike.
  static __device__ __forceinline__ void exact_scores(Scores& r_s, uint32_t q, uint32_t k,
                                                      int cols) {
    float check;  // nobody asks
#pragma unroll 1
    for (int d = 0; d * 16 < cols; ++d) {
      SplitFragment<4, true> a[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          uint32_t r[4];
          load_matrix_4(r, (q ^ (64 * d + 32 * second)) + tile * 16 * kRowBytes);
          a[tile].set(2 * second, r[0], r[2], check);
          a[tile].set(2 * second + 1, r[1], r[3], check);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        SplitFragment<2, true> b[2];
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          uint32_t r[4];
          load_matrix_4(r, (k ^ (64 * d + 32 * second)) + n * 16 * kRowBytes);
          b[0].set(second, r[0], r[1], check);
          b[1].set(second, r[2], r[3], check);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            mma_split(r_s[tile][2 * n + half], a[tile], b[half]);
          }
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
          const Value b0(even.values[i]), b1(odd.values[i]);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const float (&p)[4] = r_p[tile][k];
            const Weight a[4] = {Weight(p[0]), Weight(p[2]), Weight(p[1]), Weight(p[3])};
            mma_tf32(r_out[tile][4 * n + i], a, b0, b1);
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
        const uint32_t at = Layout::offset(tile * 16 + half * 8 + g, n * 8 + 2 * t + odd);
        store_vec(reinterpret_cast<float*>(s_rows + at), chunk);
      }
    }
  }
};

}  // namespace torchweld
