// Instructions that use and feed the tensor cores of sm_80 and newer: mma.sync, ldmatrix, and
// asynchronous copies to shared memory.
// Source: PTX ISA, "Warp-level matrix instructions" and "cp.async".
//
// A fragment is the part of an operand that a lane holds. The table lists the elements in each
// register of a fragment. The 16-bit rows are for m16n8k16, and the TF32 rows are for m16n8k8. g is
// lane / 4 and t is lane % 4. `2t..` is the pair 2t, 2t + 1 along k. Elements are (row, k) in A and
// (row, column) in C and D.
//   A  16-bit: {(g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..)}
//      TF32:   {(g, t), (g+8, t), (g, t+4), (g+8, t+4)}
//   B  16-bit: {(k 2t.., n g), (k 2t+8.., n g)}
//      TF32:   {(k t, n g), (k t+4, n g)}
//   C, D:      {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}
#pragma once

#include "device/vec.cuh"

namespace torchweld {

// Copies `bytes` bytes, at most 16, from global to shared memory. Fills the rest of the 16 bytes at
// s_to with zeros.
__device__ __forceinline__ void copy_async_16(uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

// Copies 16 bytes from global to shared memory if `there` is true. Otherwise writes 16 zero bytes
// and does not read from g_from, which may then be an invalid address.
__device__ __forceinline__ void copy_async_16_if(uint32_t s_to, const void* g_from, bool there) {
  asm volatile(
      "{ .reg .pred ignore; setp.eq.u32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignore; }" ::"r"(s_to),
      "l"(g_from), "r"(uint32_t(there))
      : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's committed copy groups are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void load_matrix_4(uint32_t (&r)[4], uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ __forceinline__ void load_matrix_4_transposed(uint32_t (&r)[4], uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t s_from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(s_from) : "memory");
  return word;
}

__device__ __forceinline__ uint4 load_words_4(uint32_t s_from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(s_from)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_word(uint32_t s_to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_to), "r"(word) : "memory");
}

// Computes d += a @ b for one m16n8k16 tile. d is fp32.
template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1);
template <>
__device__ __forceinline__ void mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                         uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Computes d += a @ b for one m16n8k8 tile. a0 and a1 are the first two registers of an m16n8k16
// fragment of A; b is the first register of a fragment of B.
template <typename T>
__device__ __forceinline__ void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b);
template <>
__device__ __forceinline__ void mma_1688<__half>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
template <>
__device__ __forceinline__ void mma_1688<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                        uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Computes d += a @ b for one m16n8k8 tile of TF32 values. The instruction ignores the low 13 bits
// of a and b.
__device__ __forceinline__ void mma_1688(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds x to TF32. Returns the bits of the rounded value as an fp32 number.
// NOTE: a NaN whose set mantissa bits are all among the low 13 bits would become inf. No
// instruction produces such a NaN.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Splits x into two TF32 values, so that x = big + small with a relative error of at most 2^-22.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.
// NOTE: the product of x and the other operand's `small` is computed as cross * small, not as big *
// small. cross equals big, except that it is 0 if x is inf or NaN. The product big * big already
// propagates inf and NaN. In big * small, inf * 0 would turn an inf result into NaN. A finite x
// that would round to inf is truncated instead.
struct SplitTf32 {
  uint32_t big, small, cross;
  __device__ __forceinline__ explicit SplitTf32(float x) {
    constexpr uint32_t kKept = 0xffffe000;
    big = round_to_tf32(x);
    const bool finite = fabsf(x) <= 3.402823466e38f;
    if (finite && isinf(__uint_as_float(big))) big = __float_as_uint(x) & kKept;
    small = finite ? round_to_tf32(x - __uint_as_float(big)) : 0u;
    cross = finite ? big : 0u;
  }
};

// copy_async_4 writes 4 bytes and copy_async_8 writes 8 bytes at s_to in shared memory. The first
// `bytes` of these bytes are copied from global memory, and the rest are zeros.
__device__ __forceinline__ void copy_async_4(uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_8(uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

// Splits the fp32 values x and y into three bf16 terms each: high + middle + low equals the value.
// A member such as `high` holds the term of x and the term of y as a pair. A product of two bf16
// terms is exact in the accumulator of a tensor core. A product of two TF32 terms is not.
// NOTE: the products of a value and the other operand's smaller terms use `cross` in place of
// `high`. If kHandlesNonFinite is true, cross equals high, except that it is 0 for a value that is
// inf or NaN. The product high * high already propagates inf and NaN. With high in the other
// products, inf * 0 would turn an inf result into NaN. A finite value that would round to inf is
// truncated instead. If kHandlesNonFinite is false, inf, NaN and values that would round to inf set
// `check` to NaN.
template <bool kHandlesNonFinite>
struct SplitBf16 {
  uint32_t high, middle, low, cross;

  __device__ __forceinline__ SplitBf16(float x, float y, float& check) {
    using T = __nv_bfloat16;
    high = pack_pair<T>(x, y);
    if constexpr (kHandlesNonFinite) high = (cut(x, high) & 0xffff) | (cut(y, high) & 0xffff0000);
    float rest_x = x - low_half(high), rest_y = y - high_half(high);
    cross = high;
    if constexpr (kHandlesNonFinite) {
      if (!finite(x)) cross &= 0xffff0000;
      if (!finite(y)) cross &= 0xffff;
      rest_x = finite(x) ? rest_x : 0.f;
      rest_y = finite(y) ? rest_y : 0.f;
    } else {
      check = fmaf(rest_x, 0.f, fmaf(rest_y, 0.f, check));
    }
    middle = pack_pair<T>(rest_x, rest_y);
    low = pack_pair<T>(rest_x - low_half(middle), rest_y - high_half(middle));
  }

 private:
  static __device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }
  // Returns `rounded`, unless x is finite but rounds to inf as bf16. In that case both halves of
  // the result are x truncated to bf16, and the caller reads the half that it needs.
  static __device__ __forceinline__ uint32_t cut(float x, uint32_t rounded) {
    // fp32 values whose absolute value is at least 2^128 - 2^119 round to inf in bf16.
    constexpr float kRoundsToInf = 3.3961775e38f;
    const uint32_t upper = __float_as_uint(x) >> 16;
    return finite(x) && fabsf(x) >= kRoundsToInf ? upper * 0x10001 : rounded;
  }
};

// An m16n8k16 fragment of fp32 values. Each value is stored as bf16 terms. kPairs is the number of
// pairs of values that a lane holds: 4 for operand A and 2 for operand B.
template <int kPairs, bool kHandlesNonFinite>
struct SplitFragment {
  uint32_t high[kPairs], middle[kPairs], low[kPairs], cross[kPairs];

  __device__ __forceinline__ void set(int pair, uint32_t x, uint32_t y, float& check) {
    const SplitBf16<kHandlesNonFinite> split(__uint_as_float(x), __uint_as_float(y), check);
    high[pair] = split.high;
    middle[pair] = split.middle;
    low[pair] = split.low;
    cross[pair] = split.cross;
  }
};

// Computes d += a @ b with fp32 accuracy. Each product of two values is the sum of six products of
// terms.
// NOTE: tensor cores truncate when they accumulate. Therefore the products of the largest terms
// have one accumulator, and the smaller products of the other terms have another. The products of
// the largest terms are exact. fp32 additions with rounding add the two accumulators to d.
template <bool kHandlesNonFinite>
__device__ __forceinline__ void mma_split(float (&d)[4],
                                          const SplitFragment<4, kHandlesNonFinite>& a,
                                          const SplitFragment<2, kHandlesNonFinite>& b) {
  using T = __nv_bfloat16;
  float rest[4] = {}, sum[4] = {};
  mma_16816<T>(rest, a.low, b.cross[0], b.cross[1]);
  mma_16816<T>(rest, a.cross, b.low[0], b.low[1]);
  mma_16816<T>(rest, a.middle, b.middle[0], b.middle[1]);
  mma_16816<T>(rest, a.middle, b.cross[0], b.cross[1]);
  mma_16816<T>(rest, a.cross, b.middle[0], b.middle[1]);
  mma_16816<T>(sum, a.high, b.high[0], b.high[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += sum[i] + rest[i];
}

// A fragment of fp32 values. Each value is stored as bf16 terms. The values may be inf or NaN,
// because mma_terms handles such values.
template <int kPairs>
struct TermFragment {
  uint32_t high[kPairs], middle[kPairs], low[kPairs];

  __device__ __forceinline__ void set(int pair, float x, float y) {
    float check = 0.f;  // set by SplitBf16<false>, but not used here
    const SplitBf16<false> split(x, y, check);
    high[pair] = split.high;
    middle[pair] = split.middle;
    low[pair] = split.low;
  }
};

// Computes partial = a @ b with fp32 accuracy for kM by 2 * kPairs tiles. The instructions of the
// tiles are interleaved. In each tile the products of the largest terms are added last. Until then
// the sum is small, because it has only the other products. Therefore the truncation errors of
// these first additions are negligible.
// If kMirrored is true, the products are added in the order of b^T @ a^T, so that both have the
// same bits. NOTE: handles_non_finite must be true if a fragment contains inf or NaN. The smaller
// terms of inf are 0, and inf * 0 would be NaN. If handles_non_finite is true, results that are not
// finite are computed from the products of the largest terms alone.
template <bool kMirrored, int kM, int kPairs>
__device__ __forceinline__ void mma_terms(float (&partial)[kM][2 * kPairs][4],
                                          const TermFragment<4> (&a)[kM],
                                          const TermFragment<2> (&b)[kPairs][2],
                                          bool handles_non_finite) {
  const auto multiply = [](float (&d)[4], const uint32_t (&x)[4], const uint32_t (&y)[2]) {
    mma_16816<__nv_bfloat16>(d, x, y[0], y[1]);
  };
  const auto for_each_tile = [&](const auto& body) {
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j) {
#pragma unroll
      for (int i = 0; i < kM; ++i) body(partial[i][j], a[i], b[j / 2][j % 2]);
    }
  };
  for_each_tile([](float (&d)[4], const auto&, const auto&) { d[0] = d[1] = d[2] = d[3] = 0.f; });
  const auto multiply_low = [&](auto& d, const auto& x, const auto& y, bool of_left) {
    of_left ? multiply(d, x.low, y.high) : multiply(d, x.high, y.low);
  };
  const auto multiply_middle = [&](auto& d, const auto& x, const auto& y, bool of_left) {
    of_left ? multiply(d, x.middle, y.high) : multiply(d, x.high, y.middle);
  };
  for_each_tile([&](auto& d, const auto& x, const auto& y) { multiply_low(d, x, y, !kMirrored); });
  for_each_tile([&](auto& d, const auto& x, const auto& y) { multiply_low(d, x, y, kMirrored); });
  for_each_tile([&](auto& d, const auto& x, const auto& y) { multiply(d, x.middle, y.middle); });
  for_each_tile(
      [&](auto& d, const auto& x, const auto& y) { multiply_middle(d, x, y, !kMirrored); });
  for_each_tile(
      [&](auto& d, const auto& x, const auto& y) { multiply_middle(d, x, y, kMirrored); });
  for_each_tile([&](auto& d, const auto& x, const auto& y) { multiply(d, x.high, y.high); });
  if (handles_non_finite) {
    for_each_tile([&](float (&d)[4], const auto& x, const auto& y) {
      float largest[4] = {};
      multiply(largest, x.high, y.high);
#pragma unroll
      for (int k = 0; k < 4; ++k) d[k] = fabsf(largest[k]) <= 3.402823466e38f ? d[k] : largest[k];
    });
  }
}

// Computes to(i, j) += a[i] @ b_j for kM fragments of A and 2 kPairs fragments of B. load(b, p)
// reads pair p of B, that is, fragments 2p and 2p + 1. The loop is pipelined: while it multiplies
// kAtOnce pairs, it loads the next pairs and adds the results of the previous pairs.
template <int kPairs, int kAtOnce, bool kMirrored = false, int kM, typename Load, typename To>
__device__ __forceinline__ void multiply_terms(const TermFragment<4> (&a)[kM],
                                               bool handles_non_finite, const Load& load,
                                               const To& to) {
  constexpr int kGroups = kPairs / kAtOnce;
  static_assert(kPairs % kAtOnce == 0);
  TermFragment<2> b[2][kAtOnce][2];
  float partial[2][kM][2 * kAtOnce][4];
  const auto read = [&](int group) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load(b[group % 2][i], group * kAtOnce + i);
  };
  const auto add = [&](int group) {
#pragma unroll
    for (int j = 0; j < 2 * kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          to(i, group * 2 * kAtOnce + j)[k] += partial[group % 2][i][j][k];
        }
      }
    }
  };
  read(0);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group + 1 < kGroups) read(group + 1);
    mma_terms<kMirrored>(partial[group % 2], a, b[group % 2], handles_non_finite);
    if (group > 0) add(group - 1);
    // NOTE: without this barrier the compiler moves the additions so late that registers spill.
    if (kGroups > 1) __syncwarp();
  }
  add(kGroups - 1);
}

}  // namespace torchweld
