// Loads register fragments from a stage of the ring. Unpacks codes to pairs of exact 16-bit values,
// and loads scales and rows of x.
#pragma once

#include <type_traits>

#include "device/mma_sync.cuh"
#include "device/vec.cuh"
#include "int4/config.h"

namespace torchweld {

// The dtype of the tensor-core operands. fp32 x is split into three bf16 terms.
template <typename T>
using Int4Factor = std::conditional_t<std::is_same_v<T, __half>, __half, __nv_bfloat16>;

// Two copies of the number 1024 (fp16) or 128 (bf16). Or-ing a code into the low bits of the number
// adds the code to the number.
template <typename U>
inline constexpr uint32_t kInt4Magic = std::is_same_v<U, __half> ? 0x64006400u : 0x43004300u;

template <typename U>
using PairOf = std::conditional_t<std::is_same_v<U, __half>, __half2, __nv_bfloat162>;

template <typename U>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  const PairOf<U> d = __hsub2(reinterpret_cast<PairOf<U>&>(a), reinterpret_cast<PairOf<U>&>(b));
  return reinterpret_cast<const uint32_t&>(d);
}

template <typename U>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const PairOf<U> d = __hmul2(reinterpret_cast<PairOf<U>&>(a), reinterpret_cast<PairOf<U>&>(b));
  return reinterpret_cast<const uint32_t&>(d);
}

__device__ __forceinline__ uint2 load_words_2(uint32_t s_from) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(s_from)
               : "memory");
  return words;
}

// Loads four words of a weight. No other thread reads these words, so they bypass the L1 cache.
// NOTE: the load is volatile, so that the compiler does not move it before griddep_wait.
__device__ __forceinline__ uint4 load_words_once(const void* g_from) {
  uint4 w;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(g_from));
  return w;
}

// Sets all accumulators of a nested array to zero.
template <typename Sums>
__device__ __forceinline__ void int4_clear(Sums& sums) {
  if constexpr (std::is_array_v<Sums>) {
#pragma unroll
    for (auto& element : sums) int4_clear(element);
  } else {
    sums = 0.f;
  }
}

// A lane holds four words of a chunk, one per 16-column slice. Returns the word of slice `slice`.
__device__ __forceinline__ uint32_t int4_slice_word(const uint4& words, int slice) {
  return slice == 0 ? words.x : slice == 1 ? words.y : slice == 2 ? words.z : words.w;
}

// Computes (a & mask) | magic.
// NOTE: this function uses asm, because `mask` and `magic` are constants. For two constant
// operands, the compiler would emit two instructions.
__device__ __forceinline__ uint32_t mask_or(uint32_t a, uint32_t mask, uint32_t magic) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
  return d;
}

// The zeros of a lane's two rows in one group. The rows are lane / 4 and lane / 4 + 8.
template <typename U>
struct Int4Zeros {
  uint32_t low, high;  // two copies of (magic number + zero)

  Int4Zeros() = default;
  __device__ __forceinline__ Int4Zeros(uint2 zeros, int lane)
      : low(kInt4Magic<U> + int4_code(zeros.x, lane / 4) * 0x10001),
        high(kInt4Magic<U> + int4_code(zeros.y, lane / 4) * 0x10001) {}
};

// Unpacks a fragment of 16 rows and 16 columns to values of code - zero. These values are exact.
template <typename U>
__device__ __forceinline__ void int4_unpack(uint32_t (&r)[4], uint32_t word,
                                            const Int4Zeros<U>& zeros) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = mask_or(word >> (4 * i), 0x000f000f, kInt4Magic<U>);
    r[i] = subtract_pair<U>(pair, i % 2 ? zeros.high : zeros.low);
  }
}

// The scales of a lane's two rows, with two copies of each. They multiply codes, and the products
// are rounded.
template <typename U>
struct Int4CodeScales {
  uint32_t low, high;

  Int4CodeScales() = default;
  __device__ __forceinline__ explicit Int4CodeScales(uint32_t pair) {
    low = __byte_perm(pair, 0, 0x1010);
    high = __byte_perm(pair, 0, 0x3232);
  }

  __device__ __forceinline__ void scale(uint32_t (&r)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = multiply_pair<U>(r[i], i % 2 ? high : low);
  }
};

// The fp32 scales of a lane's two rows. A finite scale multiplies the accumulators of a group.
// NOTE: an inf or NaN scale multiplies the codes instead (see special()), as in x @ dequantised^T.
// There, inf * 0 and inf - inf give NaN. A scale that multiplies the sum of a group would hide such
// NaN.
template <typename T>
struct Int4RowScales {
  using U = Int4Factor<T>;
  float low, high;

  Int4RowScales() = default;
  __device__ __forceinline__ explicit Int4RowScales(const Vec<T, 2>& pair)
      : low(to_float(pair.values[0])), high(to_float(pair.values[1])) {}

  // Whether a scale may be inf or NaN. The result can also be true for two large finite scales.
  __device__ __forceinline__ bool special() const { return !finite(fabsf(low) + fabsf(high)); }

  // Multiplies codes by those scales that are inf or NaN. The caller must then call keep_finite(),
  // which sets these scales to 1.
  __device__ __forceinline__ void scale_codes(uint32_t (&r)[4]) const {
    const float codes_low = finite(low) ? 1.f : low, codes_high = finite(high) ? 1.f : high;
    Int4CodeScales<U> scales;
    scales.low = pack_pair<U>(codes_low, codes_low);
    scales.high = pack_pair<U>(codes_high, codes_high);
    scales.scale(r);
  }
  __device__ __forceinline__ void keep_finite() {
    low = finite(low) ? low : 1.f;
    high = finite(high) ? high : 1.f;
  }

 private:
  static __device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }
};

// Loads operand B of mma: kCount groups of 8 tokens by 16 columns of x.
template <typename T, int kTokens>
class Int4XReader {
  static constexpr int kRowBytes = Int4Tile::x_row_bytes(sizeof(T));

 public:
  static constexpr int kTerms = sizeof(T) == 4 ? 3 : 1;
  // The number of groups that one load reads. One ldmatrix reads two groups of 16-bit x, but only
  // one group in tiles of 8 tokens.
  static constexpr int kCount = kTokens >= 16 && sizeof(T) == 2 ? 2 : 1;
  uint32_t r[kCount][kTerms][2];

  // Returns a lane's byte offset in the x of a stage.
  static __device__ __forceinline__ uint32_t offset(int lane) {
    if constexpr (sizeof(T) == 2) {
      const int block = lane >> 3, in = lane & 7;
      // NOTE: in a tile of 8 tokens, ldmatrix reads the first two 8 x 8 blocks twice, because x has
      // no further blocks.
      const int row = in + (kTokens >= 16 ? block >> 1 << 3 : 0);
      return row * kRowBytes + (((block & 1) ^ in) << 4);
    } else {
      return (lane >> 2) * kRowBytes + (lane & 3) * 8;
    }
  }

  // Loads tokens [8 * kCount * i, 8 * kCount * (i + 1)) of a slice of a chunk. s_x is the lane's
  // address in x. For 16-bit x, s_x is a multiple of 128 bytes plus the swizzle.
  __device__ __forceinline__ void load(uint32_t s_x, int chunk, int i, int slice) {
    const int from = (chunk * kTokens + i * 8 * kCount) * kRowBytes;
    if constexpr (sizeof(T) == 2) {
      uint32_t raw[4];
      load_matrix_4(raw, (s_x ^ slice << 5) + from);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        r[c][0][0] = raw[2 * c];
        r[c][0][1] = raw[2 * c + 1];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 pair = load_words_2(s_x + from + slice * 64 + half * 32);
        float ignored = 0.f;
        const SplitBf16<true> split(__uint_as_float(pair.x), __uint_as_float(pair.y), ignored);
        r[0][0][half] = split.high;
        r[0][1][half] = split.middle;
        r[0][2][half] = split.low;
      }
    }
  }
};

}  // namespace torchweld
