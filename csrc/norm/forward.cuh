// Computes LayerNorm and RMSNorm on CUDA. If a row fits in registers, the kernel reads x only once.
//
// The kernel computes the statistics in fp32 with the corrected two-pass algorithm. The first loop
// computes first_mean, the rounded mean. The second loop computes the deviations d = x -
// first_mean. mean(d) is the rounding error of first_mean, and the variance is mean(d * d) -
// mean(d)^2. This subtraction loses no digits, because mean(d) is tiny. To normalise x, the kernel
// subtracts first_mean first and mean(d) second, so the error of y does not grow with |mean| / std.
// Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
//
// One warp or one block holds a row in registers. It loads the row, reduces the sums over its
// threads and stores y. The kernel supports programmatic dependent launch: a matmul that follows
// can run its setup before this kernel ends.
#pragma once

#include "device/sm90/dependent_launch.cuh"
#include "device/statistics.cuh"
#include "norm/norm.h"
#include "norm/norm_rows.cuh"

namespace torchweld {

__device__ __forceinline__ RowNormaliser saved_statistics(const NormParams& p, int64_t row) {
  return {p.saved_mean != nullptr ? p.saved_mean[row] : 0.f, 0.f, p.saved_rstd[row]};
}

__device__ __forceinline__ void store_statistics(const NormParams& p, int64_t row,
                                                 const RowNormaliser& s) {
  if (p.mean != nullptr) p.mean[row] = s.mean();
  if (p.rstd != nullptr) p.rstd[row] = s.rstd;
}

// Stores kElems values of y. LayerNorm (kCentred) has a mean and a shift. V is the dtype of scale
// and shift.
template <bool kCentred, typename V, typename T, int kElems>
__device__ __forceinline__ void store_normalised(const NormParams& p, T* g_y, int64_t column,
                                                 const Vec<T, kElems>& x, const RowNormaliser& s) {
  constexpr int kPart = kVectorElems<V, kElems>;
  Vec<T, kElems> out;
#pragma unroll
  for (int first = 0; first < kElems; first += kPart) {
    float scale[kPart], shift[kPart];
    load_scale<V>(scale, p.scale, column + first, p.scale_offset);
    if (kCentred) load_or(shift, static_cast<const V*>(p.shift), column + first, 0.f);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const float value = to_float(x.values[first + j]);
      out.values[first + j] = from_float<T>(kCentred ? fmaf(s.normalise(value), scale[j], shift[j])
                                                     : value * s.rstd * scale[j]);
    }
  }
  store_vec(g_y + column, out);
}

template <typename T, int kElems>
__device__ __forceinline__ Vec<T, kElems> rounded_sum(const Vec<T, kElems>& x,
                                                      const Vec<T, kElems>& residual) {
  Vec<T, kElems> sum;
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    sum.values[j] = from_float<T>(to_float(x.values[j]) + to_float(residual.values[j]));
  }
  return sum;
}

// NOTE: kCentred is a template parameter. If it were a runtime value, RMSNorm would also execute
// the instructions for a mean, which is 0. With the parameter, (16384, 2048) in bf16 takes 0.90 of
// the time on an H200. If the second launch bound is 1, ptxas chooses more registers per thread.
// With fewer registers, RMSNorm with a residual would spill on sm_80.
template <typename Config, bool kAdds, bool kCentred>
__global__ __launch_bounds__(Config::kThreads,
                             kAdds && !kCentred ? 1 : 0) void norm_kernel(const NormParams p,
                                                                          int64_t first_row) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  __shared__ RowSums<Config::kThreadsPerRow> s_sums;
  griddep_launch_dependents();
  const int64_t row = Config::row(first_row);
  if (Config::kRowsPerBlock > 1 && row >= p.rows) return;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;

  Vec<T, kElems> r_x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (Config::column(i) < p.n) r_x[i] = load_vec<T, kElems>(g_x + Config::column(i));
  }
  if constexpr (kAdds) {
    const T* g_residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
    T* g_sum = static_cast<T*>(p.sum) + row * p.n;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (Config::column(i) >= p.n) continue;
      r_x[i] = rounded_sum(r_x[i], load_vec<T, kElems>(g_residual + Config::column(i)));
    }
    // NOTE: all loads of the residual come before the first store of the sum. If loads and stores
    // alternated, the loads would be issued late, because the compiler can't move a load ahead of a
    // store.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (Config::column(i) < p.n) store_vec(g_sum + Config::column(i), r_x[i]);
    }
  }

  RowNormaliser statistics;
  if (p.saved_rstd != nullptr) {
    statistics = saved_statistics(p, row);
  } else {
    float first_mean = 0.f;
    if constexpr (kCentred) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (Config::column(i) >= p.n) continue;
#pragma unroll
        for (int j = 0; j < kElems; ++j) sum += to_float(r_x[i].values[j]);
      }
      first_mean = s_sums.sum(sum) / static_cast<float>(p.n);
    }
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (Config::column(i) >= p.n) continue;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float d = to_float(r_x[i].values[j]) - first_mean;
        if constexpr (kCentred) sums.x += d;
        sums.y += d * d;
      }
    }
    if constexpr (kCentred) {
      sums = s_sums.sum(sums);
    } else {
      sums.y = s_sums.sum(sums.y);
    }
    statistics = finish_statistics(p.n, p.eps, kCentred, first_mean, sums);
    if (threadIdx.x % Config::kThreadsPerRow == 0) store_statistics(p, row, statistics);
  }

  if (p.y == nullptr) return;
  T* g_y = static_cast<T*>(p.y) + row * p.y_row_stride;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (Config::column(i) < p.n) {
      store_normalised<kCentred, typename Config::V>(p, g_y, Config::column(i), r_x[i], statistics);
    }
  }
}

// Each block normalises one row. It reads the row again for every reduction and for y. A thread
// loads kElems values at once, which are 16 bytes or one element.
template <typename T, typename V, int kElems, bool kCentred>
__global__ __launch_bounds__(kNormStreamThreads) void norm_stream_kernel(const NormParams p,
                                                                         int64_t first_row) {
  constexpr int kStep = kNormStreamThreads * kElems;
  __shared__ RowSums<kNormStreamThreads> s_sums;
  griddep_launch_dependents();
  const int64_t row = first_row + blockIdx.x;
  const int64_t start = threadIdx.x * kElems;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  if (p.residual != nullptr) {
    // The loops below read the sum from memory. They need no barrier, because a thread reads only
    // columns that it has stored itself.
    const T* g_residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
    T* g_sum = static_cast<T*>(p.sum) + row * p.n;
    for (int64_t column = start; column < p.n; column += kStep) {
      store_vec(g_sum + column, rounded_sum(load_vec<T, kElems>(g_x + column),
                                            load_vec<T, kElems>(g_residual + column)));
    }
    g_x = g_sum;
  }

  RowNormaliser statistics;
  if (p.saved_rstd != nullptr) {
    statistics = saved_statistics(p, row);
  } else {
    float first_mean = 0.f;
    if constexpr (kCentred) {
      float sum = 0.f;
      for (int64_t column = start; column < p.n; column += kStep) {
        const Vec<T, kElems> x = load_vec<T, kElems>(g_x + column);
#pragma unroll
        for (int j = 0; j < kElems; ++j) sum += to_float(x.values[j]);
      }
      first_mean = s_sums.sum(sum) / static_cast<float>(p.n);
    }
    float2 sums = make_float2(0.f, 0.f);
    for (int64_t column = start; column < p.n; column += kStep) {
      const Vec<T, kElems> x = load_vec<T, kElems>(g_x + column);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float d = to_float(x.values[j]) - first_mean;
        if constexpr (kCentred) sums.x += d;
        sums.y += d * d;
      }
    }
    if constexpr (kCentred) {
      sums = s_sums.sum(sums);
    } else {
      sums.y = s_sums.sum(sums.y);
    }
    statistics = finish_statistics(p.n, p.eps, kCentred, first_mean, sums);
    if (threadIdx.x == 0) store_statistics(p, row, statistics);
  }

  if (p.y == nullptr) return;
  T* g_y = static_cast<T*>(p.y) + row * p.y_row_stride;
  for (int64_t column = start; column < p.n; column += kStep) {
    store_normalised<kCentred, V>(p, g_y, column, load_vec<T, kElems>(g_x + column), statistics);
  }
}

template <typename T>
void launch_norm_of(const NormParams& params, cudaStream_t stream) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  const bool aligned = rows_aligned(params.x, params.x_row_stride * sizeof(T)) &&
                       rows_aligned(params.residual, params.residual_row_stride * sizeof(T)) &&
                       rows_aligned(params.sum) &&
                       rows_aligned(params.y, params.y_row_stride * sizeof(T)) &&
                       rows_aligned(params.scale) && rows_aligned(params.shift);
  const NormProblem problem{params.n, sizeof(T), aligned};
  const auto run = [&](auto adds, auto centred, auto vector) {
    using V = decltype(vector);
    constexpr bool kCentred = decltype(centred)::value;
    const auto streams = problem.vector() ? norm_stream_kernel<T, V, kElems, kCentred>
                                          : norm_stream_kernel<T, V, 1, kCentred>;
    launch_norm_rows<T, V>(
        problem, params,
        [](auto config) { return norm_kernel<decltype(config), decltype(adds)::value, kCentred>; },
        streams, stream);
  };
  const auto with_residual = [&](auto centred) {
    dispatch_vectors<T>(params.vector_dtype, [&](auto vector) {
      params.residual != nullptr ? run(std::true_type(), centred, vector)
                                 : run(std::false_type(), centred, vector);
    });
  };
  params.centred ? with_residual(std::true_type()) : with_residual(std::false_type());
}

}  // namespace torchweld
