// The kernel that adds up partial sums of columns in a fixed order. csrc/instantiations.py
// instantiates its launcher once for all passes.
#pragma once

#include "core/device.h"
#include "core/launch.h"
#include "device/reduce.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "pointwise/column_pass.cuh"

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
                         const ColumnSums& sums, cudaStream_t stream) {
  Grid grid((num_sums * n + kWarp - 1) / kWarp, dim3(kWarp, kPartialGroups));
  grid.overlaps = device_facts().clusters;
  launch_kernel(add_partials_kernel<T>, grid, stream, g_partials, chunks, num_sums, n, sums);
}

}  // namespace torchweld
