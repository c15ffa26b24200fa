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

// Rounds x to T. The conversion to bf16 has no branch, so the compiler can vectorise it.
template <typename T, typename A>
T round_to(A x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return T(static_cast<uint16_t>(x == x ? even : 0x7fc0), T::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// 16 independent accumulators, one for each lane. total() adds them up in a tree.
template <typename T>
struct LaneSums {
  static constexpr int kLanes = 16;
  T lanes[kLanes] = {};

  T total() const {
    T sums[kLanes];
    for (int l = 0; l < kLanes; ++l) sums[l] = lanes[l];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int l = 0; l < width; ++l) sums[l] += sums[l + width];
    }
    return sums[0];
  }
};

// Returns the dot product of a and b. The accumulators have type T. a and b may have different
// dtypes.
template <typename T, typename A, typename B>
T dot(const A* a, const B* b, int64_t n) {
  LaneSums<T> sums;
  constexpr int kLanes = LaneSums<T>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l)
      sums.lanes[l] += static_cast<T>(a[i + l]) * static_cast<T>(b[i + l]);
  }
  for (; i < n; ++i) sums.lanes[0] += static_cast<T>(a[i]) * static_cast<T>(b[i]);
  return sums.total();
}

// Returns the maximum of n values. If a value is NaN, the maximum is unspecified. Callers that
// compute exp(x - max) still get NaN for that value.
template <typename T>
T max_of(const T* x, int64_t n) {
  constexpr int kLanes = LaneSums<T>::kLanes;
  T lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = -std::numeric_limits<T>::infinity();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = lanes[l] > x[i + l] ? lanes[l] : x[i + l];
  }
  for (; i < n; ++i) lanes[0] = lanes[0] > x[i] ? lanes[0] : x[i];
  for (int l = 1; l < kLanes; ++l) lanes[0] = lanes[0] > lanes[l] ? lanes[0] : lanes[l];
  return lanes[0];
}

// Computes y = exp(x - max) and returns the sum of y. y may alias x. 16 lanes accumulate
// independently.
template <typename T>
T exp_and_sum(T* y, const T* x, int64_t n, T max) {
  LaneSums<T> sums;
  constexpr int kLanes = LaneSums<T>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      y[i + l] = exp_in_vectors(x[i + l] - max);
      sums.lanes[l] += y[i + l];
    }
  }
  for (; i < n; ++i) {
    y[i] = exp_in_vectors(x[i] - max);
    sums.lanes[0] += y[i];
  }
  return sums.total();
}

}  // namespace torchweld
