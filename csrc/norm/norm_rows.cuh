// What the kernels of a row norm share: how a row maps to threads, its sums, and the launch.
#pragma once

#include <type_traits>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "norm/norm_config.h"

namespace torchweld {

template <typename T_, int kTile>
struct NormConfig {
  using T = T_;
  static constexpr int kThreadsPerRow = kNormTiles[kTile].threads;
  static constexpr int kLoads = kNormTiles[kTile].loads;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  // Single warps are independent: a block of four of them serves four rows.
  static constexpr int kThreads = kThreadsPerRow == kWarp ? 4 * kWarp : kThreadsPerRow;
  static constexpr int kRowsPerBlock = kThreads / kThreadsPerRow;
  static_assert(kThreads <= 1024 && kThreadsPerRow % kWarp == 0);

  static __device__ __forceinline__ int64_t row(int64_t first_row) {
    return first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerBlock +
           threadIdx.x / kThreadsPerRow;
  }
  // The first column of this thread's access i.
  static __device__ __forceinline__ int column(int i) {
    return (i * kThreadsPerRow + threadIdx.x % kThreadsPerRow) * kElems;
  }
};

// Sums over the threads of a row. One object serves one call of each.
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

// A vector's access as fp32, `otherwise` where there is no vector.
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

// Calls launch(first row, blocks) for as many rows at a time as one grid can hold.
template <typename Launch>
void for_each_grid_of_rows(int64_t rows, int rows_per_block, const Launch& launch) {
  for_each_grid_of((rows + rows_per_block - 1) / rows_per_block,
                   [&](int64_t first, int64_t blocks) { launch(first * rows_per_block, blocks); });
}

// The scale of an access's columns in fp32: 1 where there is no vector, and then no offset.
template <typename T, int kElems>
__device__ __forceinline__ void load_scale(float (&r_to)[kElems], const void* g_scale,
                                           int64_t column, float offset) {
  load_or(r_to, static_cast<const T*>(g_scale), column, 1.f);
#pragma unroll
  for (int j = 0; j < kElems; ++j) r_to[j] += offset;
}

// Runs rows in the kernel of the problem's tile, `in_tile` of its index, or in `stream`, which
// reads a row again for every sum.
template <typename T, typename Params, typename InTile>
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
    using Config = NormConfig<T, index.value>;
    run(in_tile(Config()), Config::kRowsPerBlock, Config::kThreads);
  });
}

}  // namespace torchweld
