// dz of gate(left, right) and its sum over the rows, in one pass.
#include "device/activation.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/pointwise.h"

namespace torchweld {
namespace {

template <typename T, int kElems_>
struct GateOp {
  static constexpr int kElems = kElems_;
  static constexpr int kSums = 2;  // of the left and of the right half
  using Sum = ColumnSumOf<T>;
  static constexpr bool kExact = sizeof(T) == 4;
  using Access = Vec<T, kElems>;
  const T* g_dy;
  const T* g_z;
  T* g_dz;
  int64_t dy_row_stride, z_row_stride, dz_row_stride;
  int64_t n;
  Gate gate;
  bool interleaved;

  __device__ __forceinline__ void add_row(int64_t row, int64_t column,
                                          Sum (&sums)[2][kElems]) const {
    const auto dy = load_vec<T, kElems>(g_dy + row * dy_row_stride + column);
    // Interleaved, the two accesses are adjacent and hold left and right in turn.
    const int64_t first = interleaved ? 2 * column : column;
    const int64_t second = interleaved ? first + kElems : first + n;
    const T* g_z_row = g_z + row * z_row_stride;
    T* g_dz_row = g_dz + row * dz_row_stride;
    Access z[2] = {load_vec<T, kElems>(g_z_row + first), load_vec<T, kElems>(g_z_row + second)};
    if (interleaved) unweave(z);
    float r_dy[kElems], left[kElems], right[kElems];
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      r_dy[j] = to_float(dy.values[j]);
      left[j] = to_float(z[0].values[j]);
      right[j] = to_float(z[1].values[j]);
    }
    gate_grad<kExact>(left, right, r_dy, gate);
    Access dz[2];
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      dz[0].values[j] = from_float<T>(left[j]);
      dz[1].values[j] = from_float<T>(right[j]);
      sums[0][j] += to_float(dz[0].values[j]);
      sums[1][j] += to_float(dz[1].values[j]);
    }
    if (interleaved) weave(dz);
    store_vec(g_dz_row + first, dz[0]);
    store_vec(g_dz_row + second, dz[1]);
  }

  static __device__ __forceinline__ void unweave(Access (&pair)[2]) {
    const Access in[2] = {pair[0], pair[1]};
#pragma unroll
    for (int i = 0; i < 2 * kElems; ++i) {
      pair[i % 2].values[i / 2] = in[i / kElems].values[i % kElems];
    }
  }
  static __device__ __forceinline__ void weave(Access (&pair)[2]) {
    const Access in[2] = {pair[0], pair[1]};
#pragma unroll
    for (int i = 0; i < 2 * kElems; ++i) {
      pair[i / kElems].values[i % kElems] = in[i % 2].values[i / 2];
    }
  }
};

template <typename T, int kElems>
void launch(const GateBackwardParams& p, cudaStream_t stream) {
  const GateOp<T, kElems> op = {static_cast<const T*>(p.dy),
                                static_cast<const T*>(p.z),
                                static_cast<T*>(p.dz),
                                p.dy_row_stride,
                                p.z_row_stride,
                                p.dz_row_stride,
                                p.n,
                                p.gate,
                                p.interleaved};
  T* const g_dbias = static_cast<T*>(p.dbias);
  T* const g_dbias_right = g_dbias == nullptr ? nullptr : g_dbias + (p.interleaved ? 1 : p.n);
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
