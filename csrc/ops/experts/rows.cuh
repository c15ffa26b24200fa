// Helpers of the kernels of a layer of experts.
#pragma once

#include "core/index.h"
#include "core/launch.h"
#include "device/access.cuh"
#include "device/dispatch.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "ops/experts/experts.h"

namespace torchweld {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;

// Returns the expert of a route, or -1.
__device__ __forceinline__ int expert_of(const ExpertRoutes& r, int64_t route) {
  if (route >= r.tokens * r.k) return -1;
  const int64_t id = r.index_is_int64 ? static_cast<const int64_t*>(r.index)[route]
                                      : static_cast<const int*>(r.index)[route];
  return id >= 0 && id < r.experts ? static_cast<int>(id) : -1;
}

// The number of rows of all experts.
__device__ __forceinline__ int64_t row_count(const ExpertRoutes& r) {
  return r.ends[r.experts - 1];
}

__device__ __forceinline__ int64_t warp_index() {
  return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
}

template <typename T>
__device__ __forceinline__ float weight_of(const void* g_weight, bool fp32, int64_t route, T) {
  return fp32 ? static_cast<const float*>(g_weight)[route]
              : to_float(static_cast<const T*>(g_weight)[route]);
}

template <typename T>
__device__ __forceinline__ void store_weight(void* g_weight, bool fp32, int64_t route,
                                             float value) {
  if (fp32) {
    static_cast<float*>(g_weight)[route] = value;
  } else {
    static_cast<T*>(g_weight)[route] = from_float<T>(value);
  }
}

// Sets columns n to stride - 1 of a row to zero. There are fewer of them than lanes.
template <typename T>
__device__ __forceinline__ void clear_padding(T* g_row, const RouteRows& m) {
  const int64_t column = m.n + threadIdx.x % 32;
  if (column < m.stride) g_row[column] = from_float<T>(0.f);
}

inline int64_t blocks_of(int64_t warps) { return divide_up(warps, kWarps); }

inline MatrixRows accessed(const RouteRows& rows) { return {rows.data, rows.stride}; }

inline Grid overlapping(int64_t blocks, int threads, int shared_bytes = 0) {
  Grid grid(blocks, threads, shared_bytes);
  grid.overlaps = true;
  return grid;
}

}  // namespace torchweld
