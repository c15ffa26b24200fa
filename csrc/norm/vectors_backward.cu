// Computes the gradients of a norm with respect to scale and shift. dscale is the sum of dy * xhat
// over the rows, and dshift is the sum of dy over the rows.
#include "norm/norm.h"
#include "norm/norm_rows.cuh"
#include "pointwise/column_pass.cuh"

namespace torchweld {
namespace {

template <typename T, int kElems_>
struct NormVectorsOp {
  static constexpr int kElems = kElems_, kSums = 2;
  static constexpr bool kWrites = false;
  using Sum = ColumnSumOf<T>;
  const T* g_dy;
  const T* g_x;
  const float* g_mean;  // (rows,); nullptr for RMSNorm
  const float* g_rstd;
  int64_t dy_row_stride, x_row_stride;

  struct Loaded {
    Vec<T, kElems> dy, x;
    float mean, rstd;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {load_vec<T, kElems>(g_dy + row * dy_row_stride + column),
            load_vec<T, kElems>(g_x + row * x_row_stride + column),
            g_mean != nullptr ? g_mean[row] : 0.f, g_rstd[row]};
  }

  __device__ __forceinline__ void add(int64_t, int64_t, const Loaded& in,
                                      Sum (&sums)[2][kElems]) const {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      const float grad = to_float(in.dy.values[j]);
      sums[0][j] += grad * ((to_float(in.x.values[j]) - in.mean) * in.rstd);
      sums[1][j] += grad;
    }
  }
};

template <typename T, int kElems>
void launch(const NormVectorsBackwardParams& p, cudaStream_t stream) {
  const NormVectorsOp<T, kElems> op = {static_cast<const T*>(p.dy),
                                       static_cast<const T*>(p.x),
                                       p.mean,
                                       p.rstd,
                                       p.dy_row_stride,
                                       p.x_row_stride};
  dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
    launch_column_pass<decltype(vector)>(op, p.rows, p.n, p.partials, {{p.dscale, p.dshift}, 1},
                                         stream);
  });
}

}  // namespace

void launch_norm_vectors_backward(const NormVectorsBackwardParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n, {{p.dy, p.dy_row_stride}, {p.x, p.x_row_stride}},
      [&](auto element, auto elems) { launch<decltype(element), elems.value>(p, stream); });
  check_launch("norm_vectors_backward");
}

}  // namespace torchweld
