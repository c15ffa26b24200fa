// Vector loads and stores, and conversions between the storage types and fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace torchweld {

constexpr int kVectorBytes = 16;

// Returns the 32-bit shared-memory address of a pointer, for use in PTX instructions.
__device__ __forceinline__ uint32_t shared_address(const void* s_pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(s_pointer));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Rounds two fp32 values to a pair of 16-bit values. `low` becomes the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// low_half and high_half return the low and the high value of a bf16 pair. Each needs one
// instruction. The conversion function of CUDA needs two instructions for the high value.
__device__ __forceinline__ float low_half(uint32_t bf16_pair) {
  return __uint_as_float(bf16_pair << 16);
}
__device__ __forceinline__ float high_half(uint32_t bf16_pair) {
  return __uint_as_float(bf16_pair & 0xffff0000);
}

// Converts a pair of 16-bit values to fp32.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  return {low_half(pair), high_half(pair)};
}

// The values that one access loads or stores: a single value, or 16 bytes of values (LDG.128).
// kElems is the number of values.
template <typename T, int kElems>
struct alignas(sizeof(T) * kElems) Vec {
  T values[kElems];
};

// NOTE: the load has no streaming hint. Streaming hints (ld.cs, st.cs) made softmax 5 to 7 % slower
// on an H200.
template <typename T, int kElems>
__device__ __forceinline__ Vec<T, kElems> load_vec(const T* g_from) {
  return *reinterpret_cast<const Vec<T, kElems>*>(g_from);
}

template <typename T, int kElems>
__device__ __forceinline__ void store_vec(T* g_to, const Vec<T, kElems>& value) {
  *reinterpret_cast<Vec<T, kElems>*>(g_to) = value;
}

// Loads 16 bytes as four 32-bit words.
// NOTE: if code modifies a Vec of 16-bit values under a condition, the compiler needs an
// instruction for each 16-bit value. For words it needs only one instruction per word.
__device__ __forceinline__ uint4 load_words(const void* from) {
  return *static_cast<const uint4*>(from);
}

template <typename T>
__device__ __forceinline__ uint4 fill_words(float x) {
  uint32_t word = __float_as_uint(x);
  if constexpr (sizeof(T) == 2) word = pack_pair<T>(x, x);
  return make_uint4(word, word, word, word);
}

template <typename T>
__device__ __forceinline__ void to_floats(float* r_to, uint4 words) {
  const uint32_t r_from[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      r_to[i] = __uint_as_float(r_from[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&r_from[i]));
      r_to[2 * i] = pair.x;
      r_to[2 * i + 1] = pair.y;
    } else {
      r_to[2 * i] = low_half(r_from[i]);
      r_to[2 * i + 1] = high_half(r_from[i]);
    }
  }
}

// Negates every value.
template <typename T>
__device__ __forceinline__ uint4 negated(uint4 words) {
  constexpr uint32_t kSigns = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
  return make_uint4(words.x ^ kSigns, words.y ^ kSigns, words.z ^ kSigns, words.w ^ kSigns);
}

// Returns the maximum of all values in r_of. Each of the kCount elements of r_of holds 16 bytes of
// values. NaN values are ignored. If all values are NaN, returns -inf.
template <typename T, int kCount>
__device__ __forceinline__ float largest(const uint4 (&r_of)[kCount]) {
  float r_x[16 / sizeof(T)];
  if constexpr (sizeof(T) == 4) {
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to_floats<T>(r_x, r_of[i]);
#pragma unroll
      for (float x : r_x) max = fmaxf(max, x);
    }
    return max;
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto max_of = [](uint32_t a, uint32_t b) {
      const Pair max =
          __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
      return *reinterpret_cast<const uint32_t*>(&max);
    };
    uint32_t max = r_of[0].x;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      max = max_of(max, max_of(max_of(r_of[i].x, r_of[i].y), max_of(r_of[i].z, r_of[i].w)));
    }
    to_floats<T>(r_x, make_uint4(max, max, max, max));
    return fmaxf(fmaxf(r_x[0], r_x[1]), -INFINITY);
  }
}

// Returns the maximum of the values in `words`. NaN values are ignored. If all values are NaN,
// returns -inf.
template <typename T>
__device__ __forceinline__ float largest(uint4 words) {
  const uint4 r_of[1] = {words};
  return largest<T>(r_of);
}

// Rounds the 16 / sizeof(T) values at r_from to T and packs them into 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 words_of(const float* r_from) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(r_from[0]), __float_as_uint(r_from[1]),
                      __float_as_uint(r_from[2]), __float_as_uint(r_from[3]));
  } else {
    return make_uint4(pack_pair<T>(r_from[0], r_from[1]), pack_pair<T>(r_from[2], r_from[3]),
                      pack_pair<T>(r_from[4], r_from[5]), pack_pair<T>(r_from[6], r_from[7]));
  }
}

// Rounds the 16 / sizeof(T) values at r_from to T and stores them at g_to.
// NOTE: the function uses __stwb, because the compiler splits a plain store under a condition into
// one store per value.
template <typename T>
__device__ __forceinline__ void store_floats(T* g_to, const float* r_from) {
  __stwb(reinterpret_cast<uint4*>(g_to), words_of<T>(r_from));
}

}  // namespace torchweld
