// Drops probabilities in the accumulators of tensor-core kernels (attention/dropout.h). The lanes
// of a warp share the calls of Philox: each lane makes one call for eight probabilities of several
// lanes, and the lanes then exchange the bits.
#pragma once

#include "attention/dropout.h"

namespace torchweld {

// Transposes a matrix of 4 x 4 words. Lane i of a quad holds row i, and receives column i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = other;
  }
}

// Transposes a matrix of 8 x 8 half words. The eight lanes with the same lane % 4 hold the rows, in
// the order of the lanes. Each lane receives a column. Word i holds columns 2 i and 2 i + 1.
__device__ __forceinline__ void transpose_across_quads(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 4, second = threadIdx.x & 8, upper = threadIdx.x & 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 16);
    (upper ? words[i] : words[i + 2]) = other;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, second ? words[i] : words[i + 1], 8);
    (second ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t sent = __byte_perm(words[i], words[i + 1], odd ? 0x5410 : 0x7632);
    const uint32_t other = __shfl_xor_sync(~0u, sent, 4);
    words[i] = __byte_perm(words[i], other, odd ? 0x3254 : 0x5410);
    words[i + 1] = __byte_perm(words[i + 1], other, odd ? 0x3276 : 0x7610);
  }
}

// Sets the dropped probabilities of a warp to 0. They are in the layout of m16n8's C. The tile
// starts at first_row of the head and at first_key, a multiple of DropoutBits::kKeys.
template <int kCols>
__device__ __forceinline__ void drop_probabilities(float (&r_p)[1][kCols][4],
                                                   const AttentionDropout& dropout, uint32_t head,
                                                   uint32_t first_row, uint32_t first_key) {
  static_assert(kCols % 2 == 0);
  const auto seed = static_cast<uint64_t>(*dropout.seed);
  const uint32_t quad = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  const uint32_t row = first_row + quad + lane % 2 * 8;
  const uint32_t group = first_key / DropoutBits::kKeys + lane / 2;
#pragma unroll
  for (int j = 0; j < kCols; j += 2) {
    DropoutBits bits(seed, head, row, group + j);
    transpose_in_quad(bits.words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const pair = &r_p[0][j + i / 2][i % 2 * 2];
      if (!dropout.keeps(bits.words[i] & 0xFFFF)) pair[0] = 0.f;
      if (!dropout.keeps(bits.words[i] >> 16)) pair[1] = 0.f;
    }
  }
}

// Negates the dropped probabilities of a warp. They are transposed: the rows of m16n8's C are 16
// keys from first_key on, a multiple of DropoutBits::kKeys. The columns are query rows from
// first_row on.
template <int kCount>
__device__ __forceinline__ void mark_dropped(float (&r_p)[kCount], const AttentionDropout& dropout,
                                             uint32_t head, uint32_t first_row,
                                             uint32_t first_key) {
  static_assert(kCount % 8 == 0);
  const auto seed = static_cast<uint64_t>(*dropout.seed);
  const uint32_t quad = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  const uint32_t row = first_row + quad / 4 * 8 + lane * 2 + quad % 2;
  const uint32_t group = first_key / DropoutBits::kKeys + quad / 2 % 2;
#pragma unroll
  for (int j = 0; j < kCount; j += 8) {
    DropoutBits bits(seed, head, row + j * 2, group);
    transpose_across_quads(bits.words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const pair = &r_p[j + i * 2];
      if (!dropout.keeps(bits.words[i] & 0xFFFF)) pair[0] = -pair[0];
      if (!dropout.keeps(bits.words[i] >> 16)) pair[1] = -pair[1];
    }
  }
}

}  // namespace torchweld
