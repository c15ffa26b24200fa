// Vector loads and stores, and conversion between storage types and fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace torchweld {

constexpr int kVectorBytes = 16;

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

// kElems values that travel in one access: one element or 16 bytes (one LDG.128).
template <typename T, int kElems>
struct alignas(sizeof(T) * kElems) Vec {
  T values[kElems];
};

// NOTE: plain cached accesses. Streaming hints (ld.cs, st.cs) cost softmax 5 to 7 % on an H200.
template <typename T, int kElems>
__device__ __forceinline__ Vec<T, kElems> load_vec(const T* g_from) {
  return *reinterpret_cast<const Vec<T, kElems>*>(g_from);
}

template <typename T, int kElems>
__device__ __forceinline__ void store_vec(T* g_to, const Vec<T, kElems>& value) {
  *reinterpret_cast<Vec<T, kElems>*>(g_to) = value;
}

}  // namespace torchweld
