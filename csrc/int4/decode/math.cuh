// The math of the decode kernel: a warp multiplies a slice of 16 weight rows by 8 or 16 rows of x.
#pragma once

#include "int4/decode/config.h"
#include "int4/fragments.cuh"

namespace torchweld {

// An fma converts a code to a 16-bit float. The bits of the code, read as a 16-bit float, are a
// subnormal number or a number of the first normal binade, which has the same spacing. The value of
// this float is code * 2^-24 (fp16) or code * 2^-133 (bf16). A multiplication by 2^24 or 2^133
// would give the code, but these factors exceed the exponent range. Therefore the fma multiplies by
// the smaller constant kInt4Lift0. The result, code / kInt4Lift, is called lifted. In the end,
// the sums are multiplied by kInt4Lift.
template <typename U>
inline constexpr bool kIsHalf = std::is_same_v<U, __half>;
template <typename U>
// 2^15 for fp16, 2^127 for bf16
inline constexpr uint32_t kInt4Lift0 = kIsHalf<U> ? 0x78007800u : 0x7f007f00u;
template <typename U>
inline constexpr uint32_t kInt4Lift4 = kIsHalf<U> ? 0x68006800u : 0x7d007d00u;  // kInt4Lift0 / 16
template <typename U>
inline constexpr float kInt4Lift = kIsHalf<U> ? 512.f : 64.f;
template <typename U>
inline constexpr uint32_t kSixteenTwice = kIsHalf<U> ? 0x4c004c00u : 0x41804180u;
inline constexpr uint32_t kBothSigns = 0x80008000u;

template <typename U>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kIsHalf<U>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// The zeros of a lane's two rows. They are negated, divided by kInt4Lift (lifted), and stored in
// both halves of a register.
struct Int4LiftedZeros {
  uint32_t low, high;
  uint32_t both;  // low + 16 * high; this sum has 8 bits, so even bf16 holds it exactly
};

// Extracts the zeros of a lane's two rows from the words of a group. The masks are the same for all
// slices, so they are computed only once.
template <typename U>
class Int4ZeroPlace {
 public:
  __device__ __forceinline__ explicit Int4ZeroPlace(int lane) {
    const int row = lane / 4;
    bytes_ = 0x4040 + row / 2 * 0x0101;  // selects byte row / 2, zero-extended, in both halves
    mask_ = row % 2 ? 0x00f000f0 : 0x000f000f;
    lift_ = (row % 2 ? kInt4Lift4<U> : kInt4Lift0<U>) | kBothSigns;
    asm volatile(""
                 : "+r"(bytes_), "+r"(mask_),
                   "+r"(lift_));  // NOTE: without asm, every slice would recompute these values
  }

  __device__ __forceinline__ Int4LiftedZeros find(uint2 zeros) const {
    const uint32_t low = lifted(zeros.x), high = lifted(zeros.y);
    return {low, high, fma_pair<U>(high, kSixteenTwice<U>, low)};
  }

 private:
  __device__ __forceinline__ uint32_t lifted(uint32_t zeros) const {
    return fma_pair<U>(__byte_perm(zeros, 0, bytes_) & mask_, lift_, 0);
  }

  uint32_t bytes_, mask_, lift_;
};

// Unpacks a fragment of 16 rows and 16 columns to the values (code - zero) / kInt4Lift. These
// values are exact.
// NOTE: logic instructions have half the rate of fma. Therefore this function uses few of them: a
// byte permutation extracts the upper bytes, and an fma computes the lower code of a byte as the
// byte minus 16 times the upper code.
template <typename U>
__device__ __forceinline__ void int4_unpack_lifted(uint32_t (&r)[4], uint32_t word,
                                                   const Int4LiftedZeros& zeros) {
  const uint32_t upper = __byte_perm(word, 0, 0x4341);
  r[0] = fma_pair<U>(word & 0x000f000f, kInt4Lift0<U>, zeros.low);
  r[1] = fma_pair<U>(word & 0x00f000f0, kInt4Lift4<U>, zeros.high);
  r[3] = fma_pair<U>(upper & 0x00f000f0, kInt4Lift4<U>, zeros.high);
  const uint32_t bytes = fma_pair<U>(upper, kInt4Lift0<U>, zeros.both);
  r[2] = fma_pair<U>(r[3], kSixteenTwice<U> | kBothSigns, bytes);
}

// A slice of the weight in a lane's registers: 16 rows and kChunks chunks of columns. All columns
// of a slice lie in one group.
template <int kChunks>
struct Int4DecodeSlice {
  uint4 words[kChunks];
  uint32_t scale;  // the scales of rows lane / 4 and lane / 4 + 8
  uint2 zeros;
};

template <typename T, int kTile>
struct Int4DecodeMath {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kGroups = kT.tokens / 8;
  using Sums = float[kGroups][4];
  using Slice = Int4DecodeSlice<kT.chunks>;

  // Computes acc += (scale * (codes - zeros) / kInt4Lift) @ x^T. s_x holds the addresses of the
  // rows of x that this lane passes to ldmatrix. One ldmatrix reads 8 tokens by 32 columns.
  // `offset` is the byte offset of the slice in these rows. Int4RowScales explains kSpecial.
  template <bool kSpecial>
  static __device__ __forceinline__ void add(Sums& acc, const Slice& slice,
                                             const Int4ZeroPlace<T>& zero_place,
                                             const uint32_t (&s_x)[kGroups], int offset) {
    Int4RowScales<T> scales(reinterpret_cast<const Vec<T, 2>&>(slice.scale));
    const Int4LiftedZeros zeros = zero_place.find(slice.zeros);
    Sums sums = {};
#pragma unroll
    for (int i = 0; i < 2 * kT.chunks; ++i) {
      uint32_t b[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_matrix_4(b[g], s_x[g] + offset + i * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        int4_unpack_lifted<T>(a, int4_slice_word(slice.words[i / 2], i % 2 * 2 + half), zeros);
        if constexpr (kSpecial) scales.scale_codes(a);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          mma_16816<T>(sums[g], a, b[g][2 * half], b[g][2 * half + 1]);
        }
      }
    }
    if constexpr (kSpecial) scales.keep_finite();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[g][i] = fmaf(i < 2 ? scales.low : scales.high, sums[g][i], acc[g][i]);
      }
    }
  }

  // Whether any of a lane's accumulators is inf or NaN.
  static __device__ __forceinline__ bool not_finite(const Sums& acc) {
    float check = 0.f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) check = fmaf(acc[g][i], 0.f, check);
    }
    return check != check;
  }

  // Returns the index of an accumulator in a slot. The layout of a slot is [pair of
  // tokens][token][row].
  static __device__ __forceinline__ int sum_offset(int token, int row) {
    return token / 2 * Int4DecodeTile::kPairFloats + token % 2 * kInt4TileRows + row;
  }

  // Stores a lane's accumulators in a slot.
  static __device__ __forceinline__ void store(float* s_slot, const Sums& acc, int tokens,
                                               int lane) {
    float* s_lane = s_slot + sum_offset(lane % 4 * 2, lane / 4);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      // A slot has no space behind the last pair of tokens.
      if (lane % 4 * 2 + g * 8 >= tokens) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) s_lane[sum_offset(g * 8 + i % 2, i / 2 * 8)] = acc[g][i];
    }
  }
};

}  // namespace torchweld
