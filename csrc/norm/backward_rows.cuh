// Computes all gradients of LayerNorm and RMSNorm for rows that fit in one block. It reads dy, x
// and dsum only once.
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
//   dscale = sum over the rows of dy * xhat,  dshift = sum over the rows of dy
//   g = dy * (scale + scale_offset),  xhat = (x - mean) * rstd
//
// The grid has at most as many blocks as the GPU runs at once. Block b processes rows b, b +
// gridDim.x, ... and accumulates dscale and dshift in registers. If one warp holds a row, a block
// processes a group of four rows instead of a row. A second kernel adds up the partial sums of the
// blocks in a fixed order.
//
// cp.async prefetches the next rows into a ring of stages in shared memory. A thread reads only
// data that it has copied itself, so the copies need no barrier. The only barrier per row is for
// the reduction of the two sums over the row.
#pragma once

#include "core/device.h"
#include "device/mma_sync.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "norm/norm.h"
#include "norm/norm_rows.cuh"
#include "pointwise/column_pass.cuh"

namespace torchweld {

template <typename T_, typename V_, int kTile_, bool kCentred_>
struct BackwardConfig {
  using T = T_;
  using V = V_;  // the dtype of scale, dscale and dshift
  using Sum = ColumnSumOf<T>;
  static constexpr NormBackwardTile kTile = kNormBackwardTiles[kTile_];
  static constexpr bool kCentred = kCentred_;
  static constexpr int kThreadsPerRow = kTile.row.threads;
  static constexpr int kLoads = kTile.row.loads;
  static constexpr int kRowsPerBlock = kTile.rows_per_block();
  static constexpr int kThreads = kTile.threads();
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static constexpr int kSums = kCentred ? 2 : 1;
  // Whether the scale stays in registers. For long rows of LayerNorm, a scale in registers would
  // cause spills, so the kernel loads the scale again at each use. An fp32 scale beside 16-bit rows
  // would need twice the registers.
  static constexpr bool kKeepsScale =
      sizeof(V) == sizeof(T) && (!kCentred || kThreads * kLoads < 2048);

  // NOTE: with 8 blocks and an fp32 scale beside fp16 rows, LayerNorm would spill.
  static constexpr int kMinBlocks = sizeof(V) > sizeof(T) && kTile.blocks > 7 ? 7 : kTile.blocks;

  // Returns the first column of this thread's i-th 16-byte load of a row.
  static __device__ __forceinline__ int column(int i) {
    return (i * kThreadsPerRow + threadIdx.x % kThreadsPerRow) * kElems;
  }
};

// A thread's part of the ring of stages in shared memory. The ring holds prefetched values of dy, x
// and dsum.
template <typename Config>
struct Ring {
  using T = typename Config::T;
  const NormBackwardParams& p;
  uint4* s_first;  // the address of the thread's first 16-byte slot
  int inputs;

  __device__ __forceinline__ uint4* at(int stage, int input, int i) const {
    return s_first + ((stage * inputs + input) * Config::kLoads + i) * Config::kThreads;
  }

  // Starts the cp.async copies of a row into a stage and commits them as one group. The group is
  // empty if the row does not exist.
  __device__ __forceinline__ void fetch(int64_t row, int stage) const {
    if (row < p.rows) {
      copy(static_cast<const T*>(p.dy) + row * p.dy_row_stride, stage, 0);
      copy(static_cast<const T*>(p.x) + row * p.x_row_stride, stage, 1);
      if (inputs > 2) copy(static_cast<const T*>(p.dsum) + row * p.dsum_row_stride, stage, 2);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void floats(float (&r_to)[Config::kElems], int stage, int input,
                                         int i) const {
    to_floats<T>(r_to, *at(stage, input, i));
  }

 private:
  __device__ __forceinline__ void copy(const T* g_row, int stage, int input) const {
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      const int column = Config::column(i);
      if (column < p.n) copy_async_16(shared_address(at(stage, input, i)), g_row + column, 16);
    }
  }
};

// Waits for a cp.async group. `stages` - 1 groups are in flight, and this is the oldest of them.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  static_assert(kMinNormStages == 2 && kMaxNormStages == 4);
  if (stages == 4) return copy_async_wait<2>();
  if (stages == 3) return copy_async_wait<1>();
  copy_async_wait<0>();
}

// Stores the block's sums over its rows in the workspace `partials`, which has a (kSums, n) matrix
// for each block. If every warp processes rows of its own, the block first adds up the sums of its
// warps through s_sums, in the order of the warps.
template <typename Config>
__device__ __forceinline__ void store_sums(
    const NormBackwardParams& p, float* s_sums,
    const typename Config::Sum (&r_sums)[Config::kSums][Config::kLoads][Config::kElems]) {
  constexpr int kElems = Config::kElems;
  const int group = threadIdx.x / Config::kThreadsPerRow;
#pragma unroll
  for (int s = 0; s < Config::kSums; ++s) {
    float* g_to = p.partials + (static_cast<int64_t>(blockIdx.x) * Config::kSums + s) * p.n;
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      float r_values[kElems];
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_values[j] = r_sums[s][i][j].value();
      if constexpr (Config::kRowsPerBlock > 1) {
        // Each thread stores its values in s_sums, in slots of 16 bytes.
        __syncthreads();
        auto* s_to = reinterpret_cast<float4*>(s_sums) + threadIdx.x;
#pragma unroll
        for (int j = 0; j < kElems; j += 4) {
          s_to[j / 4 * Config::kThreads] =
              make_float4(r_values[j], r_values[j + 1], r_values[j + 2], r_values[j + 3]);
        }
        __syncthreads();
        if (group != 0) continue;
#pragma unroll
        for (int other = 1; other < Config::kRowsPerBlock; ++other) {
#pragma unroll
          for (int j = 0; j < kElems; j += 4) {
            const float4 more = s_to[j / 4 * Config::kThreads + other * Config::kThreadsPerRow];
            r_values[j] += more.x;
            r_values[j + 1] += more.y;
            r_values[j + 2] += more.z;
            r_values[j + 3] += more.w;
          }
        }
      }
      const int column = Config::column(i);
      if (column >= p.n) continue;
#pragma unroll
      for (int j = 0; j < kElems; j += 4) {
        *reinterpret_cast<float4*>(g_to + column + j) =
            make_float4(r_values[j], r_values[j + 1], r_values[j + 2], r_values[j + 3]);
      }
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinBlocks) void norm_backward_rows_kernel(
    const NormBackwardParams p, int stages) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems, kLoads = Config::kLoads;
  constexpr bool kExchanges = Config::kRowsPerBlock == 1;
  extern __shared__ uint4 s_ring[];
  // Consecutive rows use different exchange buffers, so that one barrier per row is enough.
  __shared__ PairExchange<Config::kThreadsPerRow> s_exchange[2];
  griddep_launch_dependents();
  const Ring<Config> ring = {p, s_ring + threadIdx.x, p.dsum != nullptr ? 3 : 2};
  const int64_t step = static_cast<int64_t>(gridDim.x) * Config::kRowsPerBlock;
  int64_t row = static_cast<int64_t>(blockIdx.x) * Config::kRowsPerBlock +
                threadIdx.x / Config::kThreadsPerRow;
  for (int stage = 0; stage + 1 < stages; ++stage) ring.fetch(row + stage * step, stage);

  uint4 r_scale[kLoads] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!Config::kKeepsScale || p.scale == nullptr || Config::column(i) >= p.n) continue;
    r_scale[i] = load_words(static_cast<const T*>(p.scale) + Config::column(i));
  }
  const auto scale_of = [&](float (&r_to)[kElems], int i) {
    if constexpr (!Config::kKeepsScale) {
      return load_scale<typename Config::V>(r_to, p.scale, Config::column(i), p.scale_offset);
    }
    to_floats<T>(r_to, r_scale[i]);
#pragma unroll
    for (int j = 0; j < kElems; ++j) r_to[j] = p.scale != nullptr ? r_to[j] + p.scale_offset : 1.f;
  };

  typename Config::Sum r_sums[Config::kSums][kLoads][kElems] = {};
  const bool sums_rows = p.partials != nullptr;
  const float count = static_cast<float>(p.n);
  const auto statistics = [&](int64_t of) {
    if (of >= p.rows) return make_float2(0.f, 0.f);
    return make_float2(Config::kCentred ? p.mean[of] : 0.f, p.rstd[of]);
  };
  float2 next = statistics(row);
  int stage = 0, free_stage = stages - 1, exchange = 0;
  for (; row < p.rows; row += step) {
    const float mean = next.x, rstd = next.y;
    next = statistics(row + step);
    wait_for_oldest(stages);
    // The stage of the previous row is free now, because this thread has read all its values of
    // that row.
    ring.fetch(row + (stages - 1) * step, free_stage);

    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (Config::column(i) >= p.n) continue;
      float dy[kElems], x[kElems], scale[kElems];
      ring.floats(dy, stage, 0, i);
      ring.floats(x, stage, 1, i);
      scale_of(scale, i);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float xhat = (x[j] - mean) * rstd, g = dy[j] * scale[j];
        if constexpr (Config::kCentred) sums.x += g;
        sums.y += g * xhat;
        r_sums[0][i][j] += dy[j] * xhat;
        if constexpr (Config::kCentred) r_sums[1][i][j] += dy[j];
      }
    }
    if (p.dx != nullptr) {
      sums = warp_sum(sums);
      if constexpr (kExchanges) sums = s_exchange[exchange].sum_warps(sums);
      const float mean_g = Config::kCentred ? sums.x / count : 0.f, mean_product = sums.y / count;
      T* g_dx = static_cast<T*>(p.dx) + row * p.dx_row_stride;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (Config::column(i) >= p.n) continue;
        float dy[kElems], x[kElems], scale[kElems], dsum[kElems];
        ring.floats(dy, stage, 0, i);
        ring.floats(x, stage, 1, i);
        scale_of(scale, i);
#pragma unroll
        for (int j = 0; j < kElems; ++j) dsum[j] = 0.f;
        if (ring.inputs > 2) ring.floats(dsum, stage, 2, i);
        Vec<T, kElems> out;
#pragma unroll
        for (int j = 0; j < kElems; ++j) {
          const float xhat = (x[j] - mean) * rstd, g = dy[j] * scale[j];
          out.values[j] = from_float<T>(fmaf(rstd, g - (mean_g + xhat * mean_product), dsum[j]));
        }
        store_vec(g_dx + Config::column(i), out);
      }
    }
    free_stage = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
    exchange ^= 1;
  }
  copy_async_wait<0>();
  if (sums_rows) store_sums<Config>(p, reinterpret_cast<float*>(s_ring), r_sums);
}

template <typename T>
void launch_norm_backward_rows_of(const NormBackwardParams& p, const NormBackwardPlan& plan,
                                  cudaStream_t stream) {
  const auto run = [&](auto config) {
    using Config = decltype(config);
    launch_kernel(norm_backward_rows_kernel<Config>,
                  {plan.blocks, Config::kThreads, plan.shared_bytes}, stream, p, plan.stages);
    if (p.partials == nullptr) return;
    launch_add_partials<typename Config::V>(p.partials, plan.blocks, Config::kSums, p.n,
                                            {{p.dscale, p.dshift}, 1}, stream);
  };
  dispatch_index<kNumNormBackwardTiles>(plan.tile, [&](auto tile) {
    dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
      using V = decltype(vector);
      p.mean != nullptr ? run(BackwardConfig<T, V, tile.value, true>())
                        : run(BackwardConfig<T, V, tile.value, false>());
    });
  });
}

}  // namespace torchweld
