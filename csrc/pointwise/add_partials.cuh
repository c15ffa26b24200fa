// Kernels that add up partial sums of columns and of rows in a fixed order. csrc/instantiations.py
// instantiates their launchers once for all passes.
#pragma once

#include "core/launch.h"
#include "device/reduce.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/matrix_launch.cuh"

namespace torchweld {

constexpr int kPartialGroups = 16;
constexpr int kPartialThreads = kPartialGroups * kWarp;

template <typename T>
__global__ __launch_bounds__(kPartialThreads) void add_partials_kernel(const float* g_partials,
                                                                       int64_t chunks, int num_sums,
                                                                       int64_t n,
                                                                       const ColumnSums sums) {
  __shared__ float s_sums[kPartialGroups][kWarp];
  griddep_wait();
  const int64_t width = num_sums * n;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.f;
  // NOTE: kLoads loads are in flight together, because the latency of loads is most of the time of
  // this short kernel. The additions keep the order of the chunks.
  constexpr int kLoads = 16;
  for (int64_t first = threadIdx.y; i < width && first < chunks; first += kLoads * kPartialGroups) {
    float parts[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t chunk = first + j * kPartialGroups;
      parts[j] = chunk < chunks ? g_partials[chunk * width + i] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += parts[j];
  }
  s_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= width) return;
#pragma unroll
  for (int group = 1; group < kPartialGroups; ++group) sum += s_sums[group][threadIdx.x];
  T* const g_to = static_cast<T*>(sums.to[i / n]);
  if (g_to != nullptr) g_to[i % n * sums.stride] = from_float<T>(sum);
}

template <typename T>
void launch_add_partials(const float* g_partials, int64_t chunks, int num_sums, int64_t n,
                         const ColumnSums& sums, cudaStream_t stream, bool overlaps) {
  Grid grid((num_sums * n + kWarp - 1) / kWarp, dim3(kWarp, kPartialGroups));
  grid.overlaps = overlaps;
  launch_kernel(add_partials_kernel<T>, grid, stream, g_partials, chunks, num_sums, n, sums);
}

// Adds up the partial sums of each row. If a row has few partial sums, one warp adds them up. If a
// row has many, a whole block adds them up.
template <typename T, int kThreadsPerRow, int kThreads>
__global__ __launch_bounds__(kThreads) void add_row_parts_kernel(const float* g_parts, int64_t rows,
                                                                 int64_t parts, T* g_sums) {
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreadsPerRow;
  if (kRows > 1 && row >= rows) return;
  const int thread = threadIdx.x % kThreadsPerRow;
  ColumnSumOf<T> part = {};
#pragma unroll 8
  for (int64_t i = thread; i < parts; i += kThreadsPerRow) part += g_parts[row * parts + i];
  float sum = warp_sum(part.value());
  if constexpr (kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<kThreadsPerRow> s_exchange;
    sum = s_exchange.sum_warps(sum);
  }
  if (thread == 0) g_sums[row] = from_float<T>(sum);
}

template <typename T>
void launch_add_row_parts(const float* g_parts, int64_t rows, int64_t parts, T* g_sums,
                          cudaStream_t stream) {
  constexpr int64_t kManyParts = 512;
  constexpr int kThreads = 256, kManyThreads = 1024;
  if (parts <= kManyParts) {
    launch_kernel(add_row_parts_kernel<T, kWarp, kThreads>,
                  {divide_up(rows, kThreads / kWarp), kThreads}, stream, g_parts, rows, parts,
                  g_sums);
  } else {
    launch_kernel(add_row_parts_kernel<T, kManyThreads, kManyThreads>, {rows, kManyThreads}, stream,
                  g_parts, rows, parts, g_sums);
  }
}

}  // namespace torchweld
