// Launches gated_activation and its backward. Each launch is one pass over all matrices. It runs
// the kernel of pointwise/column_pass.cuh without column sums.
#include "ops/gated_activation/gated_activation.h"
#include "pointwise/column_pass.cuh"
#include "pointwise/gate.cuh"

namespace torchweld {
namespace {

// A matrix with stride 1 along the last dimension. If g_base of dleft or dright is nullptr, the
// kernel does not write this gradient.
template <typename T>
struct MatrixView {
  T* g_base;
  int64_t row_stride;

  __device__ __forceinline__ T* at(int64_t row, int64_t column) const {
    return g_base + row * row_stride + column;
  }
};

template <typename T>
MatrixView<const T> view_of(const void* base, int64_t row_stride) {
  return {static_cast<const T*>(base), row_stride};
}

template <typename T>
MatrixView<T> result_of(void* base, int64_t n) {
  return {static_cast<T*>(base), n};
}

template <typename T, int kElems_>
struct GatedActivationOp {
  static constexpr int kElems = kElems_, kSums = 0;
  static constexpr bool kWrites = true;
  using Sum = ColumnSumOf<T>;
  MatrixView<const T> left, right;
  MatrixView<T> y;
  Gate gate;

  struct Loaded {
    Vec<T, kElems> left, right;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {load_vec<T, kElems>(left.at(row, column)), load_vec<T, kElems>(right.at(row, column))};
  }

  __device__ __forceinline__ void add(int64_t row, int64_t column, Loaded in,
                                      Sum (&)[1][kElems]) const {
    float r_left[kElems], r_right[kElems];
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      r_left[j] = to_float(in.left.values[j]);
      r_right[j] = to_float(in.right.values[j]);
    }
    apply_gate</*kExact=*/sizeof(T) == 4>(r_left, r_right, gate);
#pragma unroll
    for (int j = 0; j < kElems; ++j) in.left.values[j] = from_float<T>(r_left[j]);
    store_vec(y.at(row, column), in.left);
  }
};

template <typename T, int kElems_>
struct GatedActivationBackwardOp {
  static constexpr int kElems = kElems_, kSums = 0;
  static constexpr bool kWrites = true;
  using Sum = ColumnSumOf<T>;
  MatrixView<const T> dy, left, right;
  MatrixView<T> dleft, dright;
  Gate gate;

  struct Loaded {
    Vec<T, kElems> dy, left, right;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {load_vec<T, kElems>(dy.at(row, column)), load_vec<T, kElems>(left.at(row, column)),
            load_vec<T, kElems>(right.at(row, column))};
  }

  __device__ __forceinline__ void add(int64_t row, int64_t column, Loaded in,
                                      Sum (&)[1][kElems]) const {
    gate_grad_of(in.left.values, in.right.values, in.dy.values, gate);
    if (dleft.g_base != nullptr) store_vec(dleft.at(row, column), in.left);
    if (dright.g_base != nullptr) store_vec(dright.at(row, column), in.right);
  }
};

}  // namespace

void launch_gated_activation(const GatedActivationParams& p, cudaStream_t stream) {
  dispatch_access(p.dtype, p.n,
                  {{p.left, p.left_row_stride}, {p.right, p.right_row_stride}, {p.y, p.n}},
                  [&](auto element, auto elems) {
                    using T = decltype(element);
                    const GatedActivationOp<T, elems.value> op = {
                        view_of<T>(p.left, p.left_row_stride),
                        view_of<T>(p.right, p.right_row_stride), result_of<T>(p.y, p.n), p.gate};
                    launch_column_pass<T>(op, p.rows, p.n, nullptr, {}, stream);
                  });
  check_launch("gated_activation");
}

void launch_gated_activation_backward(const GatedActivationBackwardParams& p, cudaStream_t stream) {
  dispatch_access(p.dtype, p.n,
                  {{p.dy, p.dy_row_stride},
                   {p.left, p.left_row_stride},
                   {p.right, p.right_row_stride},
                   {p.dleft, p.n},
                   {p.dright, p.n}},
                  [&](auto element, auto elems) {
                    using T = decltype(element);
                    const GatedActivationBackwardOp<T, elems.value> op = {
                        view_of<T>(p.dy, p.dy_row_stride),
                        view_of<T>(p.left, p.left_row_stride),
                        view_of<T>(p.right, p.right_row_stride),
                        result_of<T>(p.dleft, p.n),
                        result_of<T>(p.dright, p.n),
                        p.gate};
                    launch_column_pass<T>(op, p.rows, p.n, nullptr, {}, stream);
                  });
  check_launch("gated_activation_backward");
}

}  // namespace torchweld
