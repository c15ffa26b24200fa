// The gradient of a row norm to its rows, dy and x read once where a row fits in registers:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * scale,  xhat = (x - mean) * rstd
//
// One block or one warp holds a row: load, two sums over its threads, store.
#include "norm/norm.h"
#include "norm/norm_rows.cuh"

namespace torchweld {
namespace {

// An access of a row: g and xhat.
template <int kElems>
struct RowAccess {
  float g[kElems], xhat[kElems];

  template <typename T>
  __device__ __forceinline__ RowAccess(const NormBackwardParams& p, int64_t column,
                                       const Vec<T, kElems>& dy, const Vec<T, kElems>& x,
                                       float mean, float rstd) {
    load_or(g, static_cast<const T*>(p.scale), column, 1.f);
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

  // `means` are those of g and of g * xhat.
  template <typename T>
  __device__ __forceinline__ void store(T* g_to, float2 means, float rstd) const {
    Vec<T, kElems> out;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      out.values[j] = from_float<T>(rstd * (g[j] - (means.x + xhat[j] * means.y)));
    }
    store_vec(g_to, out);
  }
};

__device__ __forceinline__ float2 means_of(const NormBackwardParams& p, float2 sums) {
  const float n = static_cast<float>(p.n);
  return make_float2(p.mean != nullptr ? sums.x / n : 0.f, sums.y / n);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void norm_backward_kernel(const NormBackwardParams p,
                                                                         int64_t first_row) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  using Access = RowAccess<kElems>;
  __shared__ RowSums<Config::kThreadsPerRow> s_sums;
  const int64_t row = Config::row(first_row);
  if (Config::kRowsPerBlock > 1 && row >= p.rows) return;
  const T* g_dy = static_cast<const T*>(p.dy) + row * p.dy_row_stride;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  T* g_dx = static_cast<T*>(p.dx) + row * p.dx_row_stride;

  Vec<T, kElems> r_dy[kLoads], r_x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (Config::column(i) >= p.n) continue;
    r_dy[i] = load_vec<T, kElems>(g_dy + Config::column(i));
    r_x[i] = load_vec<T, kElems>(g_x + Config::column(i));
  }
  const float mean = p.mean != nullptr ? p.mean[row] : 0.f;
  const float rstd = p.rstd[row];

  float2 sums = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (Config::column(i) >= p.n) continue;
    Access(p, Config::column(i), r_dy[i], r_x[i], mean, rstd).add_to(sums);
  }
  const float2 means = means_of(p, s_sums.sum(sums));
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (Config::column(i) >= p.n) continue;
    Access(p, Config::column(i), r_dy[i], r_x[i], mean, rstd)
        .store(g_dx + Config::column(i), means, rstd);
  }
}

// One block a row, which it reads twice. kElems is a 16-byte access or one element.
template <typename T, int kElems>
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
  const float mean = p.mean != nullptr ? p.mean[row] : 0.f;
  const float rstd = p.rstd[row];
  const auto load = [&](int64_t column) {
    return Access(p, column, load_vec<T, kElems>(g_dy + column), load_vec<T, kElems>(g_x + column),
                  mean, rstd);
  };

  float2 sums = make_float2(0.f, 0.f);
  for (int64_t column = start; column < p.n; column += kStep) load(column).add_to(sums);
  const float2 means = means_of(p, s_sums.sum(sums));
  for (int64_t column = start; column < p.n; column += kStep) {
    load(column).store(g_dx + column, means, rstd);
  }
}

}  // namespace

void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kElems = kVectorBytes / sizeof(T);
    const bool aligned = rows_aligned(params.dy, params.dy_row_stride * sizeof(T)) &&
                         rows_aligned(params.x, params.x_row_stride * sizeof(T)) &&
                         rows_aligned(params.dx, params.dx_row_stride * sizeof(T)) &&
                         rows_aligned(params.scale);
    const NormProblem problem{params.n, sizeof(T), aligned, /*backward=*/true};
    launch_norm_rows<T, /*kBackward=*/true>(
        problem, params, [](auto config) { return norm_backward_kernel<decltype(config)>; },
        problem.vector() ? norm_backward_stream_kernel<T, kElems>
                         : norm_backward_stream_kernel<T, 1>,
        stream);
  });
  check_launch("norm_backward");
}

}  // namespace torchweld
