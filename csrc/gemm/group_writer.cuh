// The store of groups of 8 accumulators, for the matmul kernels on mma.sync and for the kernel that
// sums split-K partials.
#pragma once

#include "device/mma_sync.cuh"
#include "device/vec.cuh"
#include "gemm/linear_epilogue.cuh"

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

// Runs the epilogue for columns [column, column + 8) of y. `column` must be less than p.n.
template <typename T>
class GroupWriter {
  static constexpr bool kExact = sizeof(T) == 4;

 public:
  __device__ __forceinline__ GroupWriter(const GemmParams& p, int64_t batch, int64_t column)
      : p_(p), batch_(batch), column_(column), columns_(int(min(int64_t{kGroup}, p.n - column))) {}

  // v holds kGroups groups. A group is 8 columns of one row. Without a gate, group i belongs to row
  // r(i) = row + i * row_step. In a gated product, groups i and kGroups / 2 + i hold the left and
  // the right values of row r(i). The function stores only rows r(0) to r(rows - 1), because y has
  // no further rows.
  // NOTE: the function processes several rows at once to hide the latency of their loads.
  template <int kGroups>
  __device__ __forceinline__ void write(int64_t row, int row_step, int rows,
                                        float (&v)[kGroups][kGroup]) const {
    const GemmEpilogue& e = p_.epilogue;
    if (!e.gated) {
      auto& values = reinterpret_cast<float (&)[kGroups * kGroup]>(v);
      linear_epilogue<kExact>(e,
                              Fragment<false, kGroups>{*this, row, row_step, rows, values, values});
    } else if constexpr (kGroups > 1) {
      constexpr int kHalf = kGroups / 2;
      auto& halves = reinterpret_cast<float (&)[2][kHalf * kGroup]>(v);
      linear_epilogue<kExact>(
          e, Fragment<true, kHalf>{*this, row, row_step, rows, halves[0], halves[1]});
    }
  }

 private:
  // kGroups groups of y. In a gated product `partner` holds the right values.
  template <bool kGated_, int kGroups>
  struct Fragment {
    static constexpr bool kGated = kGated_, kActivates = true;
    using Values = float[kGroups * kGroup];
    const GroupWriter& to;
    int64_t row;
    int row_step, rows;
    Values &values, &partner;

    static __device__ __forceinline__ auto& groups(Values& v) {
      return reinterpret_cast<float (&)[kGroups][kGroup]>(v);
    }
    __device__ __forceinline__ bool stores_preact() const {
      return to.p_.epilogue.preact != nullptr;
    }
    __device__ __forceinline__ bool pair_up() const { return true; }
    __device__ __forceinline__ void add_bias() const {
      const bool pairs = kGated && to.p_.epilogue.interleaved;
      to.add_bias(groups(values), pairs ? 2 * to.column_ : to.column_);
      if (kGated) to.add_bias(groups(partner), to.column_ + (pairs ? to.column_ + 1 : to.p_.n));
    }
    __device__ __forceinline__ void store_preact() const {
      if constexpr (kGated) {
        to.store_pairs(row, row_step, rows, groups(values), groups(partner));
      } else {
        to.store(to.preact() + to.column_, row, to.p_.n, row_step, rows, groups(values));
      }
    }
    __device__ __forceinline__ void store() const {
      to.store(to.y(), row, to.p_.y_row_stride, row_step, rows, groups(values));
    }
  };

  __device__ __forceinline__ T* preact() const {
    return static_cast<T*>(p_.epilogue.preact) + batch_ * p_.y_batch_stride;
  }
  __device__ __forceinline__ T* y() const {
    return static_cast<T*>(p_.y) + batch_ * p_.y_batch_stride + column_;
  }

  // Adds a bias to column i of every group. The bias is bias[at + i], or bias[at + 2 * i] if left
  // and right columns alternate in the bias.
  template <int kGroups>
  __device__ __forceinline__ void add_bias(float (&v)[kGroups][kGroup], int64_t at) const {
    const GemmEpilogue& e = p_.epilogue;
    float bias[kGroup];
    if (e.bias_fp32) {
      load_values(bias, static_cast<const float*>(e.bias) + at);
    } else {
      load_values(bias, static_cast<const T*>(e.bias) + at);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[g][i] += bias[i];
    }
  }

  template <int kGroups>
  __device__ __forceinline__ void store(T* g_column, int64_t row, int64_t row_stride, int row_step,
                                        int rows, const float (&v)[kGroups][kGroup]) const {
    g_column += row * row_stride;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g < rows) store_group(g_column, columns_, v[g]);
      g_column += row_step * row_stride;
    }
  }

  template <int kGroups>
  __device__ __forceinline__ void store_pairs(int64_t row, int row_step, int rows,
                                              const float (&left)[kGroups][kGroup],
                                              const float (&right)[kGroups][kGroup]) const {
    T* g_preact = preact();
    const int64_t width = 2 * p_.n;
    if (!p_.epilogue.interleaved) {
      g_preact += column_;
      store(g_preact, row, width, row_step, rows, left);
      store(g_preact + p_.n, row, width, row_step, rows, right);
      return;
    }
    g_preact += row * width + 2 * column_;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g < rows) {
        store_every_other(g_preact, columns_, left[g]);
        store_every_other(g_preact + 1, columns_, right[g]);
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
