// CPU loops that the compiler vectorises. The library is built for any x86-64 CPU. Loops in
// with_vectors are also compiled for AVX2 and for AVX-512, and one of the versions is selected at
// run time.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#define TW_SIMD_TARGETS
#endif

namespace torchweld {

#ifdef TW_SIMD_TARGETS
template <typename Body>
__attribute__((target("avx2,fma"), flatten)) void run_avx2(const Body& body) {
  body();
}

template <typename Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"),
               flatten)) void
run_avx512(const Body& body) {
  body();
}

inline int simd_level() {
  static const int level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return 2;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
  }();
  return level;
}
#endif

// Calls body(), in the version that is compiled for the widest vectors of this CPU. `body` is a
// lambda with loops over plain arrays. Every function that it calls must be inline.
template <typename Body>
void with_vectors(const Body& body) {
#ifdef TW_SIMD_TARGETS
  switch (simd_level()) {
    case 2:
      return run_avx512(body);
    case 1:
      return run_avx2(body);
  }
#endif
  body();
}

// Returns exp(r) for |r| <= log(2) / 2. Source: the polynomial of Cephes' expf.
inline float exp_polynomial(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

// Returns exp(x) with an error of at most 2 ulp, including subnormal results.
inline float exp_in_vectors(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23. Adding kRound to x rounds x to an integer.
  x = x < -104.0f ? -104.0f : x;         // exp(-104) is 0
  x = x > 89.0f ? 89.0f : x;             // exp(89) is inf
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p = exp_polynomial(r);
  // 2^n is computed as a product of two powers of 2, because n may lie outside the exponent range
  // of normal numbers.
  int32_t bits, base;
  std::memcpy(&bits, &shifted, 4);
  std::memcpy(&base, &kRound, 4);
  const int32_t exponent = bits - base, half = exponent >> 1;
  const int32_t first_bits = (half + 127) << 23, second_bits = (exponent - half + 127) << 23;
  float first, second;
  std::memcpy(&first, &first_bits, 4);
  std::memcpy(&second, &second_bits, 4);
  return p * first * second;
}
// Returns exp(x) with an error of at most 2 ulp, including subnormal results.
// Source: the rational function of Cephes' exp.
inline double exp_in_vectors(double x) {
  // 1.5 * 2^52. Adding kRound to x rounds x to an integer.
  constexpr double kRound = 6755399441055744.0;
  x = x < -746.0 ? -746.0 : x;  // exp(-746) is 0
  x = x > 710.0 ? 710.0 : x;    // exp(710) is inf
  const double shifted = x * 1.4426950408889634073599 + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  const double rr = r * r;
  const double p = r * ((1.26177193074810590878e-4 * rr + 3.02994407707441961300e-2) * rr + 1.0);
  const double q = ((3.00198505138664455042e-6 * rr + 2.52448340349684104192e-3) * rr +
                    2.27265548208155028766e-1) *
                       rr +
                   2.0;
  const double e = 1.0 + 2.0 * (p / (q - p));
  // 2^n is computed as a product of two powers of 2, because n may lie outside the exponent range
  // of normal numbers. 2048 is added to make the exponent positive. The code halves the exponent
  // with a right shift, and AVX2 has no arithmetic right shift of 64-bit integers.
  uint64_t bits, base;
  std::memcpy(&bits, &shifted, 8);
  std::memcpy(&base, &kRound, 8);
  const uint64_t exponent = bits - base + 2048, half = exponent >> 1;
  const uint64_t first_bits = (half - 1) << 52, second_bits = (exponent - half - 1) << 52;
  double first, second;
  std::memcpy(&first, &first_bits, 8);
  std::memcpy(&second, &second_bits, 8);
  return e * first * second;
}

// Returns exp(x) for x <= 0 with an error of at most 2 ulp. This function is faster than
// exp_in_vectors. x may exceed 0 by a rounding error. If the result would be less than the smallest
// normal number, the function returns 0.
inline float exp_of_negative(float x) {
  constexpr float kRound = 12582912.0f;
  x = x < -88.03f ? -88.03f : x;  // at -88.03, n is -127, for which 2^n is computed as 0
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits << 23) + (127u << 23);
  float factor;
  std::memcpy(&factor, &bits, 4);
  return exp_polynomial(r) * factor;
}
inline double exp_of_negative(double x) { return exp_in_vectors(x); }

// Returns tanh(x) with an error of at most 3 ulp. Source: the polynomial of Cephes' tanhf.
inline float tanh_in_vectors(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = p * z * x + x;
  const float far = 1.0f - 2.0f / (exp_in_vectors(2.0f * std::abs(x)) + 1.0f);
  return z < 0.390625f ? near : std::copysign(far, x);
}
inline double tanh_in_vectors(double x) { return std::tanh(x); }

// Returns the bits of x rounded to bf16. The function has no branch, so the compiler can vectorise
// its callers.
inline uint32_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? even : 0x7fc0;
}

// Rounds x to T.
template <typename T, typename A>
T round_to(A x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return T(static_cast<uint16_t>(bf16_bits(x)), T::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// Splits x into two bf16 numbers, whose sum differs from x by at most 2^-17 |x|.
inline void split_to_bf16(float x, uint32_t& high, uint32_t& low) {
  high = bf16_bits(x);
  const uint32_t bits = high << 16;
  float rounded;
  std::memcpy(&rounded, &bits, 4);
  low = bf16_bits(x - rounded);
}

// A vector type of kBytes bytes. The compiler splits it if the CPU has only narrower vectors.
// NOTE: if the type were an array, the compiler would load and store the lanes for every addition.
// For AVX2, GCC 12 passes the halves of a vector of 64 bytes through memory: a dot product would be
// ten times slower.
template <typename T, int kBytes = 32>
struct CpuLanes {
  typedef T Type __attribute__((vector_size(kBytes)));
  static constexpr int kCount = kBytes / sizeof(T);
};

// Loads consecutive values and converts them to the type of the lanes. If V is a scalar type, loads
// one value.
template <typename V, typename A>
inline void load_lanes(V& to, const A* from) {
  if constexpr (std::is_arithmetic_v<V>) {
    to = static_cast<V>(*from);
  } else {
    using T = std::decay_t<decltype(to[0])>;
    if constexpr (std::is_same_v<T, A>) {
      std::memcpy(&to, from, sizeof(V));
    } else if constexpr (std::is_same_v<A, c10::BFloat16>) {
      using Bits = typename CpuLanes<uint16_t, sizeof(V) / 2>::Type;
      using Wide = typename CpuLanes<uint32_t, sizeof(V)>::Type;
      Bits bits;
      std::memcpy(&bits, from, sizeof(bits));
      const Wide wide = __builtin_convertvector(bits, Wide) << 16;
      std::memcpy(&to, &wide, sizeof(V));
    } else {
      T values[sizeof(V) / sizeof(T)];
      for (size_t l = 0; l < sizeof(V) / sizeof(T); ++l) values[l] = static_cast<T>(from[l]);
      std::memcpy(&to, values, sizeof(V));
    }
  }
}

// Combines the lanes of v in a tree. combine(x, y) sets x to the combination of x and y, which are
// vectors or scalars.
// NOTE: with arrays in place of vectors, the compiler would keep the lanes in memory.
template <typename V, typename Combine>
auto reduce_lanes(const V& v, const Combine& combine) {
  using T = std::decay_t<decltype(v[0])>;
  if constexpr (sizeof(V) == 2 * sizeof(T)) {
    T x = v[0];
    combine(x, T(v[1]));
    return x;
  } else {
    typename CpuLanes<T, sizeof(V) / 2>::Type halves[2];
    std::memcpy(halves, &v, sizeof(halves));
    combine(halves[0], halves[1]);
    return reduce_lanes(halves[0], combine);
  }
}
template <typename V>
auto sum_of_lanes(const V& v) {
  return reduce_lanes(v, [](auto& x, const auto& y) { x += y; });
}

// 16 independent accumulators, one for each lane. total() adds them up in a tree.
template <typename T>
struct LaneSums {
  static constexpr int kLanes = 16;
  T lanes[kLanes] = {};

  T total() const {
    constexpr int kVectors = kLanes / CpuLanes<T>::kCount;
    typename CpuLanes<T>::Type sums[kVectors];
    std::memcpy(sums, lanes, sizeof(lanes));
    for (int v = 1; v < kVectors; ++v) sums[0] += sums[v];
    return sum_of_lanes(sums[0]);
  }
};

// Returns the dot product of a and b. The accumulators have type T. a and b may have different
// dtypes.
template <typename T, typename A, typename B>
T dot(const A* a, const B* b, int64_t n) {
  using V = typename CpuLanes<T>::Type;
  constexpr int kLanes = CpuLanes<T>::kCount, kChains = LaneSums<T>::kLanes / kLanes;
  V chains[kChains] = {};
  int64_t i = 0;
  for (; i + LaneSums<T>::kLanes <= n; i += LaneSums<T>::kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      V x, y;
      load_lanes(x, a + i + chain * kLanes);
      load_lanes(y, b + i + chain * kLanes);
      chains[chain] += x * y;
    }
  }
  for (int chain = 1; chain < kChains; ++chain) chains[0] += chains[chain];
  // NOTE: a tail that is added to a lane would pass all lanes through memory.
  T sum = sum_of_lanes(chains[0]);
  for (; i < n; ++i) sum += static_cast<T>(a[i]) * static_cast<T>(b[i]);
  return sum;
}

// Adds factors (count,) @ rows (count, n) to columns first, first + 1, ... of sum (n,), kVectors
// vectors at a time. Returns the first column that is left.
template <int kVectors, typename T, typename B>
int64_t add_rows_in_vectors(T* sum, const T* factors, const B* rows, int64_t count, int64_t stride,
                            int64_t n, int64_t first) {
  constexpr int kLanes = CpuLanes<T>::kCount;
  for (; first + kVectors * kLanes <= n; first += kVectors * kLanes) {
    typename CpuLanes<T>::Type parts[kVectors], row;
    std::memcpy(parts, sum + first, sizeof(parts));
    for (int64_t r = 0; r < count; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        load_lanes(row, rows + r * stride + first + v * kLanes);
        parts[v] += factors[r] * row;
      }
    }
    std::memcpy(sum + first, parts, sizeof(parts));
  }
  return first;
}

// Computes sum (n,) += factors (count,) @ rows (count, n). The rows are `stride` elements apart.
template <typename T, typename B>
void add_rows(T* sum, const T* factors, const B* rows, int64_t count, int64_t stride, int64_t n) {
  int64_t i = add_rows_in_vectors<8>(sum, factors, rows, count, stride, n, 0);
  i = add_rows_in_vectors<1>(sum, factors, rows, count, stride, n, i);
  for (; i < n; ++i) {
    for (int64_t r = 0; r < count; ++r) {
      sum[i] += factors[r] * static_cast<T>(rows[r * stride + i]);
    }
  }
}

// Returns the maximum of n values. If a value is NaN, the maximum is unspecified. Callers that
// compute exp(x - max) still get NaN for that value.
template <typename T>
T max_of(const T* x, int64_t n) {
  using V = typename CpuLanes<T>::Type;
  constexpr int kLanes = CpuLanes<T>::kCount;
  T max = -std::numeric_limits<T>::infinity();
  int64_t i = 0;
  if (n >= kLanes) {
    V lanes, next;
    load_lanes(lanes, x);
    for (i = kLanes; i + kLanes <= n; i += kLanes) {
      load_lanes(next, x + i);
      lanes = lanes > next ? lanes : next;
    }
    max = reduce_lanes(lanes, [](auto& a, const auto& b) { a = a > b ? a : b; });
  }
  for (; i < n; ++i) max = max > x[i] ? max : x[i];
  return max;
}

// Computes y = exp(x - max) and returns the sum of y. y may alias x. No element of x may exceed
// max. If kSubnormals is false, results below the smallest normal number become 0. 16 lanes
// accumulate independently.
template <bool kSubnormals = false, typename T>
T exp_and_sum(T* y, const T* x, int64_t n, T max) {
  const auto exp = [](T shifted) {
    return kSubnormals ? exp_in_vectors(shifted) : exp_of_negative(shifted);
  };
  LaneSums<T> sums;
  constexpr int kLanes = LaneSums<T>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      y[i + l] = exp(x[i + l] - max);
      sums.lanes[l] += y[i + l];
    }
  }
  for (; i < n; ++i) {
    y[i] = exp(x[i] - max);
    sums.lanes[0] += y[i];
  }
  return sums.total();
}

}  // namespace torchweld
