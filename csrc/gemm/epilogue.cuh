// The epilogue for groups of 8 accumulators: it adds the bias, stores the pre-activation, applies
// the activation or the gate, rounds, and stores the results. The matmul kernels and the kernel
// that sums split-K partials share this code.
//
// The activation is a runtime value, not a template parameter, so that one kernel serves every
// activation and gate. The switch on the activation costs nothing, because it is outside of the
// loop over the 8 values.
#pragma once

#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "device/vec.cuh"
#include "gemm/gemm.h"

namespace torchweld {

constexpr int kGroup = 8;  // the number of columns that a thread stores at once

// store_sums writes 8 fp32 sums to the split-K workspace. add_sums reads 8 sums from the workspace
// and adds them to v.
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

// Rounds the first `columns` values of v to T and stores them one after the other from g_to on.
template <typename T>
__device__ __forceinline__ void store_group(T* g_to, int columns, const float (&v)[kGroup]) {
  if (columns == kGroup && reinterpret_cast<uintptr_t>(g_to) % 16 == 0) {
    // NOTE: __stwb is used because the compiler would split a plain 16-byte store here into four
    // stores.
    if constexpr (sizeof(T) == 2) {
      __stwb(reinterpret_cast<uint4*>(g_to),
             make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                        pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])));
    } else {
      store_sums(g_to, v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < columns) g_to[i] = from_float<T>(v[i]);
    }
  }
}

// Stores the first `columns` values of v at g_to[0], g_to[2], g_to[4], ... The values are one half
// (left or right) of an interleaved pre-activation.
template <typename T>
__device__ __forceinline__ void store_every_other(T* g_to, int columns, const float (&v)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i < columns) g_to[2 * i] = from_float<T>(v[i]);
  }
}

// Runs the epilogue for columns [column, column + 8) of y. `column` must be less than p.n. If
// kBiasOfBatch is true, every batch has a bias of its own, as in a product with groups of rows.
template <typename T, bool kBiasOfBatch = false>
class GroupWriter {
  static constexpr bool kExact = sizeof(T) == 4;

 public:
  __device__ __forceinline__ GroupWriter(const GemmParams& p, int64_t batch, int64_t column)
      : p_(p), batch_(batch), column_(column), columns_(int(min(int64_t{kGroup}, p.n - column))) {}

  // v holds kGroups groups. A group is 8 columns of one row. Without a gate, group i belongs to row
  // r(i) = row + i * row_step. In a gated product, groups i and kGroups / 2 + i hold the left and
  // the right values of row r(i). The function stores only rows r(0) to r(rows - 1), because y has
  // no further rows.
  // NOTE: the function processes several rows at once to hide the latency of their loads. It does
  // not call linear_epilogue: the largest fp32 tile has 255 registers and then spills up to 8
  // bytes.
  template <int kGroups>
  __device__ __forceinline__ void write(int64_t row, int row_step, int rows,
                                        float (&v)[kGroups][kGroup]) const {
    const GemmEpilogue& e = p_.epilogue;
    auto& all = reinterpret_cast<float (&)[kGroups * kGroup]>(v);
    if (!e.gated) {
      add_bias<0, kGroups>(v, column_);
      if (e.preact != nullptr) {
        T* g_preact = static_cast<T*>(e.preact) + batch_ * p_.y_batch_stride;
        store<0, kGroups>(g_preact + column_, row, p_.n, row_step, rows, v);
      }
      activate<kExact>(all, e.activation);
      store<0, kGroups>(y(), row, p_.y_row_stride, row_step, rows, v);
    } else if constexpr (kGroups > 1) {
      constexpr int kHalf = kGroups / 2;
      add_bias<0, kHalf>(v, e.interleaved ? 2 * column_ : column_);
      add_bias<kHalf, kGroups>(v, e.interleaved ? 2 * column_ + 1 : p_.n + column_);
      if (e.preact != nullptr) store_preact<kHalf>(row, row_step, rows, v);
      auto& left = reinterpret_cast<float (&)[kHalf * kGroup]>(v[0]);
      const auto& right = reinterpret_cast<float (&)[kHalf * kGroup]>(v[kHalf]);
      apply_gate<kExact>(left, right, e.gate);
      store<0, kHalf>(y(), row, p_.y_row_stride, row_step, rows, v);
    }
  }

 private:
  __device__ __forceinline__ T* y() const {
    return static_cast<T*>(p_.y) + batch_ * p_.y_batch_stride + column_;
  }

  // Adds a bias to column i of groups kFirst to kLast - 1. The bias is bias[at + i], or
  // bias[at + 2 * i] if left and right columns alternate in the bias.
  template <int kFirst, int kLast, int kGroups>
  __device__ __forceinline__ void add_bias(float (&v)[kGroups][kGroup], int64_t at) const {
    const GemmEpilogue& e = p_.epilogue;
    if (e.bias == nullptr) return;
    if constexpr (kBiasOfBatch) at += batch_ * (e.gated ? 2 * p_.n : p_.n);
    float bias[kGroup];
    if (e.bias_fp32) {
      load_values(bias, static_cast<const float*>(e.bias) + at);
    } else {
      load_values(bias, static_cast<const T*>(e.bias) + at);
    }
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[g][i] += bias[i];
    }
  }

  template <int kFirst, int kLast, int kGroups>
  __device__ __forceinline__ void store(T* g_column, int64_t row, int64_t row_stride, int row_step,
                                        int rows, const float (&v)[kGroups][kGroup]) const {
    g_column += row * row_stride;
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
      if (g - kFirst < rows) store_group(g_column, columns_, v[g]);
      g_column += row_step * row_stride;
    }
  }

  template <int kHalf, int kGroups>
  __device__ __forceinline__ void store_preact(int64_t row, int row_step, int rows,
                                               const float (&v)[kGroups][kGroup]) const {
    T* g_preact = static_cast<T*>(p_.epilogue.preact);
    const int64_t width = 2 * p_.n;
    if (!p_.epilogue.interleaved) {
      g_preact += column_;
      store<0, kHalf>(g_preact, row, width, row_step, rows, v);
      store<kHalf, kGroups>(g_preact + p_.n, row, width, row_step, rows, v);
      return;
    }
    g_preact += row * width + 2 * column_;
#pragma unroll
    for (int g = 0; g < kHalf; ++g) {
      if (g < rows) {
        store_every_other(g_preact, columns_, v[g]);
        store_every_other(g_preact + 1, columns_, v[kHalf + g]);
      }
      g_preact += row_step * width;
    }
  }

  template <typename U>
  __device__ __forceinline__ void load_values(float (&v)[kGroup], const U* g_from) const {
    constexpr int kChunk = 16 / sizeof(U);
    const bool interleaved = p_.epilogue.interleaved;
    if (columns_ == kGroup && !interleaved && reinterpret_cast<uintptr_t>(g_from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kGroup; i += kChunk) {
        const auto chunk = load_vec<U, kChunk>(g_from + i);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) v[i + j] = to_float(chunk.values[j]);
      }
      return;
    }
    // NOTE: all values are loaded before the first one is converted, because a conversion waits for
    // the load of its value.
    U raw[kGroup];
    const int stride = interleaved ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) raw[i] = g_from[i < columns_ ? i * stride : 0];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = to_float(raw[i]);
  }

  const GemmParams& p_;
  int64_t batch_, column_;
  int columns_;
};

}  // namespace torchweld
