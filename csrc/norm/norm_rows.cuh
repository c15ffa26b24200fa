// Helpers that the kernels of LayerNorm and RMSNorm share: the mapping of a row to threads, the
// reductions over a row, and the launch.
#pragma once

#include <type_traits>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "norm/norm_config.h"

namespace torchweld {

template <typename T_, typename V_, int kTile>
struct NormConfig {
  using T = T_;
  using V = V_;  // the dtype of scale and shift
  static constexpr int kThreadsPerRow = kNormTiles[kTile].threads;
  static constexpr int kLoads = kNormTiles[kTile].loads;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  // If one warp holds a row, a block has four independent warps, so it processes four rows.
  static constexpr int kThreads = kThreadsPerRow == kWarp ? 4 * kWarp : kThreadsPerRow;
  static constexpr int kRowsPerBlock = kThreads / kThreadsPerRow;
  static_assert(kThreads <= 1024 && kThreadsPerRow % kWarp == 0);

  static __device__ __forceinline__ int64_t row(int64_t first_row) {
    return first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerBlock +
           threadIdx.x / kThreadsPerRow;
  }
  // Returns the first column of this thread's i-th 16-byte load of a row.
  static __device__ __forceinline__ int column(int i) {
    return (i * kThreadsPerRow + threadIdx.x % kThreadsPerRow) * kElems;
  }
};

// Sums values over the threads that hold a row. There are two overloads. Each of them may be called
// only once per object, because a second call would overwrite shared memory that other threads may
// still read.
template <int kThreadsPerRow>
struct RowSums {
  BlockExchange<kThreadsPerRow> s_one;
  PairExchange<kThreadsPerRow> s_two;

  __device__ __forceinline__ float sum(float x) {
    x = warp_sum(x);
    if constexpr (kThreadsPerRow > kWarp) x = s_one.sum_warps(x);
    return x;
  }
  __device__ __forceinline__ float2 sum(float2 x) {
    x = warp_sum(x);
    if constexpr (kThreadsPerRow > kWarp) x = s_two.sum_warps(x);
    return x;
  }
};

// Loads kElems values of a vector and converts them to fp32. If g_vector is nullptr, sets all
// values to `otherwise`.
template <typename T, int kElems>
__device__ __forceinline__ void load_or(float (&r_to)[kElems], const T* g_vector, int64_t column,
                                        float otherwise) {
  Vec<T, kElems> in;
  if (g_vector != nullptr) in = load_vec<T, kElems>(g_vector + column);
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    r_to[j] = g_vector != nullptr ? to_float(in.values[j]) : otherwise;
  }
}

// Splits the rows into ranges that one grid can process. Calls launch(first_row, blocks) for each
// range.
template <typename Launch>
void for_each_grid_of_rows(int64_t rows, int rows_per_block, const Launch& launch) {
  for_each_grid_of((rows + rows_per_block - 1) / rows_per_block,
                   [&](int64_t first, int64_t blocks) { launch(first * rows_per_block, blocks); });
}

// The values of a vector of dtype V that one load of 16 bytes holds, at most kElems.
template <typename V, int kElems>
constexpr int kVectorElems = kElems < kVectorBytes / sizeof(V) ? kElems : kVectorBytes / sizeof(V);

// Loads values of the scale, converts them to fp32 and adds `offset`. If g_scale is nullptr, the
// results are 1 + offset.
template <typename V, int kCount>
__device__ __forceinline__ void load_scale(float (&r_to)[kCount], const void* g_scale,
                                           int64_t column, float offset) {
  constexpr int kPart = kVectorElems<V, kCount>;
  auto& r_parts = reinterpret_cast<float (&)[kCount / kPart][kPart]>(r_to);
#pragma unroll
  for (int i = 0; i < kCount / kPart; ++i) {
    load_or(r_parts[i], static_cast<const V*>(g_scale), column + i * kPart, 1.f);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) r_to[j] += offset;
}

// Calls body with a value of the dtype of the vectors, which is T or fp32.
template <typename T, typename Body>
void dispatch_vectors(DType vector_dtype, const Body& body) {
  if constexpr (sizeof(T) == 2) {
    if (vector_dtype != DType::kFloat32) return body(T());
  }
  body(float());
}

// If there is a tile for the problem, launches the kernel in_tile(config). Otherwise launches
// `streams`, the kernel that reads a row again for every reduction.
template <typename T, typename V, typename Params, typename InTile>
void launch_norm_rows(const NormProblem& problem, const Params& params, const InTile& in_tile,
                      void (*streams)(Params, int64_t), cudaStream_t stream) {
  const int tile = choose_norm_tile(problem);
  const auto run = [&](auto kernel, int rows_per_block, unsigned threads) {
    for_each_grid_of_rows(params.rows, rows_per_block, [&](int64_t first, int64_t blocks) {
      launch_kernel(kernel, {blocks, threads}, stream, params, first);
    });
  };
  if (tile < 0) return run(streams, 1, kNormStreamThreads);
  dispatch_index<kNumNormTiles>(tile, [&](auto index) {
    using Config = NormConfig<T, V, index.value>;
    run(in_tile(Config()), Config::kRowsPerBlock, Config::kThreads);
  });
}

}  // namespace torchweld
