// What happens to rows of 8 finished sums: bias, pre-activation, activation or gate, rounding. The
// matmul kernels and the sum of a split product share it.
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

// Up to 8 adjacent results in each of a thread's rows.
template <typename T>
class ResultColumn {
 public:
  ResultColumn() = default;
  __device__ __forceinline__ ResultColumn(void* g_base, int64_t row, int64_t row_stride,
                                          int64_t column, int64_t columns_left, int row_step)
      : g_at_(static_cast<T*>(g_base) + row * row_stride + column),
        step_(row_step * row_stride),
        columns_(columns_left < kGroup ? int(columns_left) : kGroup) {
    const uint64_t bits = reinterpret_cast<uintptr_t>(g_at_) | (row_stride * sizeof(T));
    wide_ = columns_ == kGroup && bits % 16 == 0;
  }

  __device__ __forceinline__ void store(const float (&v)[kGroup]) const {
    if (wide_) {
      // NOTE: __stwb, because the compiler splits a plain store here into four.
      if constexpr (sizeof(T) == 2) {
        __stwb(reinterpret_cast<uint4*>(g_at_),
               make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                          pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])));
      } else {
        store_sums(g_at_, v);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i < columns_) g_at_[i] = from_float<T>(v[i]);
      }
    }
  }
  // Every other element of twice the width: the results of an interleaved half.
  __device__ __forceinline__ void store_every_other(const float (&v)[kGroup], int half) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < columns_) g_at_[2 * i + half] = from_float<T>(v[i]);
    }
  }
  __device__ __forceinline__ void next_row() { g_at_ += step_; }

 private:
  T* g_at_;
  int64_t step_;
  int columns_;
  bool wide_;
};

// Columns [column, column + 8) of y, from `row` on every row_step rows; column < n.
template <typename T>
class RowWriter {
  static constexpr bool kExact = sizeof(T) == 4;

 public:
  __device__ __forceinline__ RowWriter(const GemmParams& p, int64_t batch, int64_t row,
                                       int64_t column, int row_step)
      : epilogue_(p.epilogue),
        y_(static_cast<T*>(p.y) + batch * p.y_batch_stride, row, p.y_row_stride, column,
           p.n - column, row_step) {
    const GemmEpilogue& e = p.epilogue;
    const int64_t left = p.n - column;
    load_bias(bias_, e.interleaved ? 2 * column : column, left);
    if (e.preact != nullptr) {
      const int64_t width = e.gated ? 2 * p.n : p.n;
      preact_ = ResultColumn<T>(e.preact, row, width, e.interleaved ? 2 * column : column, left,
                                row_step);
    }
    if (!e.gated) return;
    load_bias(right_bias_, e.interleaved ? 2 * column + 1 : p.n + column, left);
    if (e.preact != nullptr && !e.interleaved) {
      right_preact_ = ResultColumn<T>(e.preact, row, 2 * p.n, p.n + column, left, row_step);
    }
  }

  // The next row. `right` is a gated product's other half.
  __device__ __forceinline__ void write(float (&v)[kGroup], float (&right)[kGroup]) {
    add(v, bias_);
    if (epilogue_.gated) add(right, right_bias_);
    if (epilogue_.preact != nullptr) store_preact(v, right);
    if (epilogue_.gated) {
      apply_gate<kExact>(v, right, epilogue_.gate);
    } else {
      activate<kExact>(v, epilogue_.activation);
    }
    y_.store(v);
    y_.next_row();
  }

 private:
  static __device__ __forceinline__ void add(float (&v)[kGroup], const float (&bias)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] += bias[i];
  }

  __device__ __forceinline__ void store_preact(const float (&v)[kGroup],
                                               const float (&right)[kGroup]) {
    if (epilogue_.interleaved) {
      preact_.store_every_other(v, 0);
      preact_.store_every_other(right, 1);
    } else {
      preact_.store(v);
      if (epilogue_.gated) right_preact_.store(right);
    }
    preact_.next_row();
    right_preact_.next_row();
  }

  // From element `at` on, every other one where halves are interleaved.
  __device__ __forceinline__ void load_bias(float (&bias)[kGroup], int64_t at,
                                            int64_t columns_left) const {
    if (epilogue_.bias == nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) bias[i] = 0.f;
    } else if (epilogue_.bias_fp32) {
      load_values(bias, static_cast<const float*>(epilogue_.bias) + at, columns_left);
    } else {
      load_values(bias, static_cast<const T*>(epilogue_.bias) + at, columns_left);
    }
  }

  template <typename U>
  __device__ __forceinline__ void load_values(float (&v)[kGroup], const U* g_from,
                                              int64_t columns_left) const {
    constexpr int kPiece = 16 / sizeof(U);
    if (columns_left >= kGroup && !epilogue_.interleaved &&
        reinterpret_cast<uintptr_t>(g_from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kGroup; i += kPiece) {
        const auto piece = load_vec<U, kPiece>(g_from + i);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) v[i + j] = to_float(piece.values[j]);
      }
      return;
    }
    // NOTE: all loads before the first conversion, which would wait for each in turn.
    U raw[kGroup];
    const int step = epilogue_.interleaved ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) raw[i] = g_from[i < columns_left ? i * step : 0];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = to_float(raw[i]);
  }

  const GemmEpilogue& epilogue_;
  ResultColumn<T> y_, preact_ = {}, right_preact_ = {};
  float bias_[kGroup], right_bias_[kGroup];
};

}  // namespace torchweld
