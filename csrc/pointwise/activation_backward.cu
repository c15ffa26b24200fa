// Computes dz = dy * activation'(z) and the sum of dz over the rows, in one pass over the matrix.
// This file also has the launcher of a kernel that adds up the partial sums of other kernels.
#include "device/activation.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/pointwise.h"

namespace torchweld {
namespace {

template <typename T, int kElems_>
struct ActivationOp {
  static constexpr int kElems = kElems_, kSums = 1;
  static constexpr bool kWrites = true;
  using Sum = ColumnSumOf<T>;
  static constexpr bool kExact = sizeof(T) == 4;
  const T* g_dy;
  const T* g_z;
  T* g_dz;
  int64_t dy_row_stride, z_row_stride, dz_row_stride;
  Activation activation;

  struct Loaded {
    Vec<T, kElems> dy, z;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {load_vec<T, kElems>(g_dy + row * dy_row_stride + column),
            load_vec<T, kElems>(g_z + row * z_row_stride + column)};
  }

  __device__ __forceinline__ void add(int64_t row, int64_t column, const Loaded& in,
                                      Sum (&sums)[1][kElems]) const {
    float r_dz[kElems], r_z[kElems];
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      r_dz[j] = to_float(in.dy.values[j]);
      r_z[j] = to_float(in.z.values[j]);
    }
    activation_grad<kExact>(r_dz, r_z, activation);
    Vec<T, kElems> dz;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      dz.values[j] = from_float<T>(r_dz[j]);
      sums[0][j] += to_float(dz.values[j]);
    }
    store_vec(g_dz + row * dz_row_stride + column, dz);
  }
};

// The op for a layer without an activation. It only sums dy over the rows and stores no matrix.
template <typename T, int kElems_>
struct SumOp {
  static constexpr int kElems = kElems_, kSums = 1;
  static constexpr bool kWrites = false;
  using Sum = ColumnSumOf<T>;
  const T* g_dy;
  int64_t dy_row_stride;

  __device__ __forceinline__ Vec<T, kElems> load(int64_t row, int64_t column) const {
    return load_vec<T, kElems>(g_dy + row * dy_row_stride + column);
  }

  __device__ __forceinline__ void add(int64_t, int64_t, const Vec<T, kElems>& dy,
                                      Sum (&sums)[1][kElems]) const {
#pragma unroll
    for (int j = 0; j < kElems; ++j) sums[0][j] += to_float(dy.values[j]);
  }
};

template <typename T, int kElems>
void launch(const ActivationBackwardParams& p, cudaStream_t stream) {
  const ColumnSums sums = {{p.dbias, nullptr}, 1};
  const T* g_dy = static_cast<const T*>(p.dy);
  if (p.activation == Activation::kNone) {
    const SumOp<T, kElems> op = {g_dy, p.dy_row_stride};
    launch_column_pass<T>(op, p.rows, p.n, p.partials, sums, stream);
    return;
  }
  const ActivationOp<T, kElems> op = {g_dy,
                                      static_cast<const T*>(p.z),
                                      static_cast<T*>(p.dz),
                                      p.dy_row_stride,
                                      p.z_row_stride,
                                      p.dz_row_stride,
                                      p.activation};
  launch_column_pass<T>(op, p.rows, p.n, p.partials, sums, stream);
}

}  // namespace

void launch_activation_backward(const ActivationBackwardParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n, {{p.dy, p.dy_row_stride}, {p.z, p.z_row_stride}, {p.dz, p.dz_row_stride}},
      [&](auto element, auto elems) { launch<decltype(element), elems.value>(p, stream); });
  check_launch("activation_backward");
}

void launch_partial_sums(const PartialSumsParams& p, cudaStream_t stream) {
  dispatch_dtype(p.dtype, [&](auto element) {
    launch_add_partials<decltype(element)>(p.partials, p.chunks, 1, p.n, {{p.y, nullptr}, 1},
                                           stream);
  });
  check_launch("partial_sums");
}

}  // namespace torchweld
