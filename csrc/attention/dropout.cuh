// Drops probabilities in the accumulators of tensor-core kernels (attention/dropout.h).
#pragma once

#include "attention/dropout.h"

namespace torchweld {

// The dropout of a head in the registers of a warp.
struct WarpDropout {
  uint64_t seed;
  uint32_t head;
  uint32_t last;  // the largest number whose upper 16 bits drop a probability

  // NOTE: the shuffles tell the compiler that all lanes have the same seed. It then computes the
  // keys of Philox's rounds once for the warp.
  __device__ __forceinline__ WarpDropout(const AttentionDropout& dropout, uint32_t head)
      : head(head), last((dropout.threshold << 16) - 1) {
    const auto given = static_cast<uint64_t>(*dropout.seed);
    const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(given), 0);
    const uint32_t high = __shfl_sync(~0u, static_cast<uint32_t>(given >> 32), 0);
    seed = uint64_t{high} << 32 | low;
  }
  __device__ __forceinline__ bool drops_low(uint32_t word) const { return word << 16 <= last; }
  __device__ __forceinline__ bool drops_high(uint32_t word) const { return word <= last; }
};

// Sets the dropped probabilities of a warp to 0. They are in the layout of m16n8's C. The first row
// and the first key are multiples of DropoutBits::kSquare.
template <int kCols>
__device__ __forceinline__ void drop_probabilities(float (&r_p)[1][kCols][4],
                                                   const WarpDropout& dropout, uint32_t first_row,
                                                   uint32_t first_key) {
  static_assert(kCols % 2 == 0);
  const uint32_t quad = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  const uint32_t row_unit = DropoutBits::row_unit(first_row) + quad;
  const uint32_t key_unit = DropoutBits::key_unit(first_key) + lane;
#pragma unroll
  for (int j = 0; j < kCols; j += 2) {
    const DropoutBits bits(dropout.seed, dropout.head, row_unit, key_unit + j * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const pair = &r_p[0][j + i % 2][i / 2 * 2];
      if (dropout.drops_low(bits.words[i])) pair[0] = 0.f;
      if (dropout.drops_high(bits.words[i])) pair[1] = 0.f;
    }
  }
}

// Negates the dropped probabilities of a warp. They are transposed: the rows of m16n8's C are 16
// keys from first_key on, and the columns are query rows from first_row on. Both are multiples of
// DropoutBits::kSquare.
// NOTE: two lanes that hold neighbouring keys share their units. Each lane calls Philox for one of
// two rows, and the lanes exchange the bits of the other row.
template <int kCount>
__device__ __forceinline__ void mark_dropped(float (&r_p)[kCount], const WarpDropout& dropout,
                                             uint32_t first_row, uint32_t first_key) {
  static_assert(kCount % 8 == 0);
  const uint32_t key = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  const bool odd = key % 2 != 0;
  const uint32_t row_unit = DropoutBits::row_unit(first_row) + lane * 2 + key % 2;
  const uint32_t key_unit = DropoutBits::key_unit(first_key) + key / 2;
#pragma unroll
  for (int j = 0; j < kCount; j += 8) {
    const DropoutBits bits(dropout.seed, dropout.head, row_unit + j, key_unit);
    // The low halves belong to the even key. sent[i] has the halves of words 2 * i and 2 * i + 1.
    uint32_t received[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t sent =
          __byte_perm(bits.words[2 * i], bits.words[2 * i + 1], odd ? 0x5410 : 0x7632);
      received[i] = __shfl_xor_sync(~0u, sent, 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t selector = i % 2 ? (odd ? 0x3276 : 0x7610) : (odd ? 0x3254 : 0x5410);
      const uint32_t rows = __byte_perm(bits.words[i], received[i / 2], selector);
      float* const pair = &r_p[j + i * 2];
      if (dropout.drops_low(rows)) pair[0] = -pair[0];
      if (dropout.drops_high(rows)) pair[1] = -pair[1];
    }
  }
}

}  // namespace torchweld
