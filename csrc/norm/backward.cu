// Computes the gradients of LayerNorm and RMSNorm on CUDA. This file chooses the kernels. It also
// contains one kernel, which computes dx for two kinds of rows: rows that are too long for the
// kernel in backward_rows.cuh, and rows that are not aligned.
#include "core/device.h"
#include "norm/norm.h"
#include "norm/norm_rows.cuh"
#include "pointwise/column_split.h"

namespace torchweld {
namespace {

// kElems columns of a row in the registers of a thread. g = dy * scale, and xhat = (x - mean) *
// rstd.
template <int kElems>
struct RowAccess {
  float g[kElems], xhat[kElems];

  template <typename V, typename T>
  __device__ __forceinline__ RowAccess(V, const NormBackwardParams& p, int64_t column,
                                       const Vec<T, kElems>& dy, const Vec<T, kElems>& x,
                                       float mean, float rstd) {
    load_scale<V>(g, p.scale, column, p.scale_offset);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      g[j] *= to_float(dy.values[j]);
      xhat[j] = (to_float(x.values[j]) - mean) * rstd;
    }
  }

  __device__ __forceinline__ void add_to(float2& sums) const {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      sums.x += g[j];
      sums.y += g[j] * xhat[j];
    }
  }

  // Stores dx. means.x is the mean of g over the row, and means.y is the mean of g * xhat. If
  // g_dsum is nullptr, dsum is 0.
  template <typename T>
  __device__ __forceinline__ void store(T* g_to, const T* g_dsum, float2 means, float rstd) const {
    float dsum[kElems];
    load_or(dsum, g_dsum, 0, 0.f);
    Vec<T, kElems> out;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      out.values[j] = from_float<T>(fmaf(rstd, g[j] - (means.x + xhat[j] * means.y), dsum[j]));
    }
    store_vec(g_to, out);
  }
};

__device__ __forceinline__ float2 means_of(const NormBackwardParams& p, float2 sums) {
  const float n = static_cast<float>(p.n);
  return make_float2(p.mean != nullptr ? sums.x / n : 0.f, sums.y / n);
}

// Each block computes dx of one row. It reads dy and x twice: first to compute the sums over the
// row, then to compute dx. A thread loads kElems values at once, which are 16 bytes or one element.
template <typename T, typename V, int kElems>
__global__ __launch_bounds__(kNormStreamThreads) void norm_backward_stream_kernel(
    const NormBackwardParams p, int64_t first_row) {
  constexpr int kStep = kNormStreamThreads * kElems;
  using Access = RowAccess<kElems>;
  __shared__ RowSums<kNormStreamThreads> s_sums;
  const int64_t row = first_row + blockIdx.x;
  const int64_t start = threadIdx.x * kElems;
  const T* g_dy = static_cast<const T*>(p.dy) + row * p.dy_row_stride;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  T* g_dx = static_cast<T*>(p.dx) + row * p.dx_row_stride;
  const T* g_dsum =
      p.dsum != nullptr ? static_cast<const T*>(p.dsum) + row * p.dsum_row_stride : nullptr;
  const float mean = p.mean != nullptr ? p.mean[row] : 0.f;
  const float rstd = p.rstd[row];
  const auto load = [&](int64_t column) {
    return Access(V(), p, column, load_vec<T, kElems>(g_dy + column),
                  load_vec<T, kElems>(g_x + column), mean, rstd);
  };

  float2 sums = make_float2(0.f, 0.f);
  for (int64_t column = start; column < p.n; column += kStep) load(column).add_to(sums);
  const float2 means = means_of(p, s_sums.sum(sums));
  for (int64_t column = start; column < p.n; column += kStep) {
    load(column).store(g_dx + column, g_dsum != nullptr ? g_dsum + column : nullptr, means, rstd);
  }
}

}  // namespace

void launch_norm_backward_stream(const NormBackwardParams& p, cudaStream_t stream) {
  dispatch_access(p.dtype, p.n,
                  {{p.dy, p.dy_row_stride},
                   {p.x, p.x_row_stride},
                   {p.dsum, p.dsum_row_stride},
                   {p.dx, p.dx_row_stride},
                   {p.scale, 0}},
                  [&](auto element, auto elems) {
                    using T = decltype(element);
                    dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
                      const auto kernel =
                          norm_backward_stream_kernel<T, decltype(vector), elems.value>;
                      for_each_grid_of_rows(p.rows, 1, [&](int64_t first, int64_t blocks) {
                        launch_kernel(kernel, {blocks, kNormStreamThreads}, stream, p, first);
                      });
                    });
                  });
}

NormBackwardPlan plan_norm_backward(const NormBackwardParams& p) {
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  const bool aligned = rows_aligned(p.dy, p.dy_row_stride * size) &&
                       rows_aligned(p.x, p.x_row_stride * size) &&
                       rows_aligned(p.dsum, p.dsum_row_stride * size) &&
                       rows_aligned(p.dx, p.dx_row_stride * size) && rows_aligned(p.scale);
  const int sums = p.dscale == nullptr && p.dshift == nullptr ? 0 : p.mean != nullptr ? 2 : 1;
  const DeviceFacts& facts = device_facts();
  return choose_norm_backward({p.n, static_cast<int>(size), aligned}, p.rows,
                              p.dsum != nullptr ? 3 : 2, sums, facts.sms, facts.shared_limit,
                              column_partials(p.rows, p.n));
}

void launch_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  const NormBackwardPlan plan = plan_norm_backward(p);
  if (plan.tile >= 0) {
    dispatch_dtype(p.dtype, [&](auto element) {
      launch_norm_backward_rows_of<decltype(element)>(p, plan, stream);
    });
  } else {
    // NOTE: dscale and dshift are computed before dx, because dx may overwrite dy.
    if (p.partials != nullptr) {
      launch_norm_vectors_backward(
          {p.dy, p.x, p.mean, p.rstd, p.dscale, p.dshift, p.partials, p.rows, p.n, p.dy_row_stride,
           p.x_row_stride, p.dtype, p.vector_dtype},
          stream);
    }
    if (p.dx != nullptr) launch_norm_backward_stream(p, stream);
  }
  check_launch("norm_backward");
}

}  // namespace torchweld
