// Computes dz and the sum of dz over the rows, in one pass over the matrix. dz is the gradient with
// respect to z, whose halves are the operands of y = gate(left, right). The pass can also store y.
#include "pointwise/column_pass.cuh"
#include "pointwise/gate.cuh"
#include "pointwise/pointwise.h"

namespace torchweld {
namespace {

template <typename T>
struct GateArgs {
  const T* g_dy;
  const T* g_z;
  T* g_dz;
  T* g_act;
  int64_t dy_row_stride, z_row_stride, dz_row_stride;
  Gate gate;
};

// The op for an access of kElems columns of dy. In z, the left and the right value of a column of
// dy are n columns apart. If kElems is 1, they may also be adjacent (interleaved).
template <typename T, int kElems_>
struct GateOp : GateArgs<T> {
  static constexpr int kElems = kElems_;
  // The number of column sums: one for the left half and one for the right half.
  static constexpr int kSums = 2;
  static constexpr bool kWrites = true;
  using Sum = ColumnSumOf<T>;
  int64_t first_step, apart;  // 1 and n; for an interleaved z 2 and 1

  struct Loaded {
    Vec<T, kElems> dy, left, right;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const T* g_left = this->g_z + row * this->z_row_stride + column * first_step;
    return {load_vec<T, kElems>(this->g_dy + row * this->dy_row_stride + column),
            load_vec<T, kElems>(g_left), load_vec<T, kElems>(g_left + apart)};
  }

  __device__ __forceinline__ void add(int64_t row, int64_t column, Loaded in,
                                      Sum (&sums)[2][kElems]) const {
    gate_grad_of(in.left.values, in.right.values, in.dy.values, this->gate);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      sums[0][j] += to_float(in.left.values[j]);
      sums[1][j] += to_float(in.right.values[j]);
    }
    T* g_left = this->g_dz + row * this->dz_row_stride + column * first_step;
    store_vec(g_left, in.left);
    store_vec(g_left + apart, in.right);
    if (this->g_act != nullptr) {
      store_vec(this->g_act + row * this->dy_row_stride + column, in.dy);
    }
  }
};

// The op for an interleaved z, in which left and right values alternate. An access is kElems
// columns of z, which belong to kElems / 2 columns of dy.
// NOTE: if an access were kElems columns of dy instead, each load of z by a warp would skip every
// second chunk of 16 bytes. Such loads took 1.3 times as long.
template <typename T, int kElems_>
struct PairedGateOp : GateArgs<T> {
  static constexpr int kElems = kElems_, kPairs = kElems / 2;
  static constexpr int kSums = 1;
  static constexpr bool kWrites = true;
  using Sum = ColumnSumOf<T>;

  struct Loaded {
    Vec<T, kPairs> dy;
    Vec<T, kElems> z;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {load_vec<T, kPairs>(this->g_dy + row * this->dy_row_stride + column / 2),
            load_vec<T, kElems>(this->g_z + row * this->z_row_stride + column)};
  }

  __device__ __forceinline__ void add(int64_t row, int64_t column, Loaded in,
                                      Sum (&sums)[1][kElems]) const {
    T left[kPairs], right[kPairs];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      left[j] = in.z.values[2 * j];
      right[j] = in.z.values[2 * j + 1];
    }
    gate_grad_of(left, right, in.dy.values, this->gate);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      in.z.values[2 * j] = left[j];
      in.z.values[2 * j + 1] = right[j];
    }
#pragma unroll
    for (int j = 0; j < kElems; ++j) sums[0][j] += to_float(in.z.values[j]);
    store_vec(this->g_dz + row * this->dz_row_stride + column, in.z);
  }
};

template <typename T, int kElems>
void launch(const GateBackwardParams& p, cudaStream_t stream) {
  const GateArgs<T> args = {static_cast<const T*>(p.dy),
                            static_cast<const T*>(p.z),
                            static_cast<T*>(p.dz),
                            static_cast<T*>(p.act),
                            p.dy_row_stride,
                            p.z_row_stride,
                            p.dz_row_stride,
                            p.gate};
  T* const g_dbias = static_cast<T*>(p.dbias);
  if constexpr (kElems > 1) {
    if (p.interleaved) {
      const PairedGateOp<T, kElems> op = {args};
      return launch_column_pass<T>(op, p.rows, 2 * p.n, p.partials, {{g_dbias, nullptr}, 1},
                                   stream);
    }
  }
  const int64_t apart = p.interleaved ? 1 : p.n;
  const GateOp<T, kElems> op = {args, p.interleaved ? 2 : 1, apart};
  T* g_dbias_right = static_cast<T*>(p.dbias_right);
  if (p.interleaved && g_dbias != nullptr) g_dbias_right = g_dbias + 1;
  const ColumnSums sums = {{g_dbias, g_dbias_right}, p.interleaved ? 2 : 1};
  launch_column_pass<T>(op, p.rows, p.n, p.partials, sums, stream);
}

}  // namespace

void launch_gate_backward(const GateBackwardParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n, {{p.dy, p.dy_row_stride}, {p.z, p.z_row_stride}, {p.dz, p.dz_row_stride}},
      [&](auto element, auto elems) { launch<decltype(element), elems.value>(p, stream); });
  check_launch("gate_backward");
}

}  // namespace torchweld
