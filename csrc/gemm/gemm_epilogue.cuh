// What happens to a row of 8 finished sums: bias, pre-activation, activation or gate, rounding.
// The matmul kernels and the split-K sum share it.
#pragma once

#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "device/vec.cuh"
#include "gemm/gemm.h"

namespace torchweld {

constexpr int kGroup = 8;  // columns that a thread finishes at a time

// 8 sums of a split product, to the workspace and from it.
__device__ __forceinline__ void store_sums(float* g_sums, const float (&v)[kGroup]) {
  __stwb(reinterpret_cast<float4*>(g_sums), make_float4(v[0], v[1], v[2], v[3]));
  __stwb(reinterpret_cast<float4*>(g_sums) + 1, make_float4(v[4], v[5], v[6], v[7]));
}

__device__ __forceinline__ void add_sums(float (&v)[kGroup], const float* g_sums) {
  const auto part = load_vec<float, 4>(g_sums), rest = load_vec<float, 4>(g_sums + 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] += part.values[i];
    v[4 + i] += rest.values[i];
  }
}

template <typename T>
class RowWriter {
  static constexpr bool kExact = sizeof(T) == 4;

 public:
  __device__ __forceinline__ RowWriter(const GemmParams& params, int64_t batch)
      : p_(params),
        y_(static_cast<T*>(params.y) + batch * params.y_batch_stride),
        wide_y_(wide(y_, params.y_row_stride)) {}

  // Columns [column, column + 8) of a row; those at n and beyond are dropped.
  __device__ __forceinline__ void write(int64_t row, int64_t column, float (&v)[kGroup],
                                        const float (&bias)[kGroup]) const {
    const GemmEpilogue& e = p_.epilogue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] += bias[i];
    if (e.preact != nullptr) {
      T* z = static_cast<T*>(e.preact) + row * p_.n + column;
      store(z, v, column, wide(static_cast<T*>(e.preact), p_.n));
    }
    if (e.activation != Activation::kNone) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = activate<kExact>(v[i], e.activation);
    }
    store(y_ + row * p_.y_row_stride + column, v, column, wide_y_);
  }

  __device__ __forceinline__ void write_gated(int64_t row, int64_t column, float (&left)[kGroup],
                                              float (&right)[kGroup],
                                              const float (&left_bias)[kGroup],
                                              const float (&right_bias)[kGroup]) const {
    const GemmEpilogue& e = p_.epilogue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      left[i] += left_bias[i];
      right[i] += right_bias[i];
    }
    if (e.preact != nullptr) {
      T* z = static_cast<T*>(e.preact) + row * 2 * p_.n;
      if (e.interleaved) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (column + i >= p_.n) break;
          z[2 * (column + i)] = from_float<T>(left[i]);
          z[2 * (column + i) + 1] = from_float<T>(right[i]);
        }
      } else {
        const bool is_wide = wide(static_cast<T*>(e.preact), p_.n);
        store(z + column, left, column, is_wide);
        store(z + p_.n + column, right, column, is_wide);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) left[i] = apply_gate<kExact>(left[i], right[i], e.gate);
    store(y_ + row * p_.y_row_stride + column, left, column, wide_y_);
  }

  // The biases of 8 columns; `half` 1 asks for a gated product's right ones.
  __device__ __forceinline__ void load_bias(float (&bias)[kGroup], int64_t column, int half) const {
    const GemmEpilogue& e = p_.epilogue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      bias[i] = 0.f;
      if (e.bias == nullptr || column + i >= p_.n) continue;
      const int64_t at = e.interleaved ? 2 * (column + i) + half : half * p_.n + column + i;
      bias[i] = e.bias_fp32 ? static_cast<const float*>(e.bias)[at]
                            : to_float(static_cast<const T*>(e.bias)[at]);
    }
  }

 private:
  // True where 8 columns of every row may be stored in 16-byte pieces.
  static __device__ __forceinline__ bool wide(const T* base, int64_t row_stride) {
    return ((reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(row_stride * sizeof(T))) &
            15) == 0;
  }

  __device__ __forceinline__ void store(T* g_to, const float (&v)[kGroup], int64_t column,
                                        bool is_wide) const {
    if (is_wide && column + kGroup <= p_.n) {
      // NOTE: __stwb, because the compiler splits a plain store here into four.
      if constexpr (sizeof(T) == 2) {
        __stwb(reinterpret_cast<uint4*>(g_to),
               make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                          pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])));
      } else {
        __stwb(reinterpret_cast<float4*>(g_to), make_float4(v[0], v[1], v[2], v[3]));
        __stwb(reinterpret_cast<float4*>(g_to) + 1, make_float4(v[4], v[5], v[6], v[7]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (column + i < p_.n) g_to[i] = from_float<T>(v[i]);
      }
    }
  }

  const GemmParams& p_;
  T* y_;
  bool wide_y_;
};

}  // namespace torchweld
