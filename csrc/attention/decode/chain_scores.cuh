// The first kernel of the chain engine (decode/chain.cuh): the probabilities of all steps.
#pragma once

#include "attention/decode/chain_memory.cuh"
#include "attention/sync/warp_16bit.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

template <typename T_, int kDim_, int kKeys_, bool kLazy_>
struct ChainScoresConfig {
  using T = T_;
  static constexpr int kDim = kDim_, kKeys = kKeys_, kRows = AttentionDecodeTile::kRows;
  // A warp computes the scores of kWarpKeys keys.
  static constexpr int kWarps = 2, kThreads = kWarps * kWarp, kWarpKeys = kKeys / kWarps;
  static constexpr bool kLazy = kLazy_;  // kLazyRescale of Hopper's kernel
  using Layout = AttentionLayout<T, kDim>;
  using Matmul = WarpMatmul16<T, kDim, 1, kWarpKeys>;
  using Memory = ChainMemory<kKeys / 16>;
  struct Shared {
    T query[kRows * kDim];
    T key[kWarps][kWarpKeys * kDim];
    float max[kWarps][kRows], max_before[kWarps][kRows];
    float2 sum[kWarp];  // of rows lane / 4 and lane / 4 + 8, over the keys of the first warp
  };
};

#if TW_HAS_WGMMA
// Returns the maximum of row lane % 16 over steps before `step`, as online_softmax keeps it. If the
// maximum is not lazy, the halves of the two warps divide the steps among themselves. Waits until
// the steps are published.
template <typename Config>
__device__ __forceinline__ float earlier_max(const typename Config::Memory& memory, int64_t group,
                                             int step, float c) {
  constexpr int kBatch = 16, kStride = Config::kLazy ? 1 : Config::kThreads / Config::kRows;
  const int row = threadIdx.x % Config::kRows;
  const uint64_t* const g_words = memory.step_words(group, 0) + row;
  float max = -INFINITY;
  for (int first = threadIdx.x / Config::kRows % kStride; first < step; first += kBatch * kStride) {
    uint64_t words[kBatch];
    const auto load = [&](int i) {
      words[i] = memory.load(g_words + (first + i * kStride) * Config::kRows);
    };
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kStride < step) load(i);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kStride >= step) break;
      while (!memory.is_published(words[i])) load(i);
      const float step_max = __uint_as_float(static_cast<uint32_t>(words[i]));
      max = next_max<Config::kLazy>(max, fmaxf(max, step_max), c);
    }
  }
  if constexpr (kStride > 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, Config::kRows));
  return max;
}

// Loads the query rows of the work tile and the warp's keys, whose first key is `first_key`.
template <typename Config>
__device__ __forceinline__ void load_chain_scores(const AttentionParams& p, const ChainWork& work,
                                                  typename Config::Shared& s, int first_key) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
  const int lane = threadIdx.x % kWarp, columns = static_cast<int>(p.sizes.head_dim);
  AttentionLoader<Layout, Config::kWarpKeys, kWarp> load_key(
      matrix_of<T>(p.key, work.batch, work.kv_head, work.pad + first_key), p.key.row_stride,
      columns, lane);
  load_key.load(lane, shared_address(s.key[threadIdx.x / kWarp]), work.keys - first_key);
#pragma unroll
  for (int i = threadIdx.x; i < Config::kRows * Layout::kChunks; i += Config::kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const DecodeWork::Row query_row = work.row(row);
    copy_async_16_if(
        shared_address(s.query) + Layout::offset(row, chunk),
        matrix_of<T>(p.query, work.batch, query_row.head, query_row.index) + chunk * Layout::kElems,
        row < work.rows && chunk * Layout::kElems < columns);
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
}
#endif

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void attention_chain_scores_kernel(
    const __grid_constant__ AttentionParams p, const ScoreScale scale,
    const __grid_constant__ DecodePlan plan, const typename Config::Memory memory) {
#if TW_HAS_WGMMA
  using T = typename Config::T;
  using Matmul = typename Config::Matmul;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  ChainWork work(plan);
  griddep_wait();
  work.find_keys(p);
  const int step = work.split, first_key = step * Config::kKeys + warp * Config::kWarpKeys;
  if (step * Config::kKeys >= work.keys) return;
  // The kernel of the values may start when all blocks have passed this point.
  griddep_launch_dependents();
  load_chain_scores<Config>(p, work, s, first_key);

  typename Matmul::Scores r_s = {};
  Matmul(lane, 0).scores(r_s, reinterpret_cast<const char*>(s.query),
                         reinterpret_cast<const char*>(s.key[warp]), Config::kDim);
  if (scale.sign != 1.f) {
#pragma unroll
    for (auto& r_scores : r_s[0]) {
#pragma unroll
      for (float& score : r_scores) score *= scale.sign;
    }
  }
  DecodeFragmentKeys<1, true>(p, work).hide_others(r_s, first_key);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float max = quad_max(max_of_row(r_s[0], half, -INFINITY));
    if (lane % 4 == 0) s.max[warp][half * 8 + lane / 4] = max;
  }
  __syncthreads();
  if (const int row = threadIdx.x; row < Config::kRows) {
    memory.publish(memory.step_words(work.group, step) + row, fmaxf(s.max[0][row], s.max[1][row]));
  }
  const float before = earlier_max<Config>(memory, work.group, step, scale.c);
  if (lane < Config::kRows) s.max_before[warp][lane] = before;
  __syncthreads();

  float row_max[2], factor[2], sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    const float row_before = fmaxf(s.max_before[0][row], s.max_before[1][row]);
    const float top = fmaxf(row_before, fmaxf(s.max[0][row], s.max[1][row]));
    row_max[half] = next_max<Config::kLazy>(row_before, top, scale.c);
    sum[half] =
        exponentiate<Matmul::kFtz>(r_s[0], half, row_before, row_max[half], scale.c, factor[half]);
  }
  auto& g_step = memory.step(work.group, step);
#pragma unroll
  for (int slice = 0; slice < Config::kWarpKeys / 16; ++slice) {
    const float (&low)[4] = r_s[0][2 * slice], (&high)[4] = r_s[0][2 * slice + 1];
    g_step.p[warp * (Config::kWarpKeys / 16) + slice][lane] =
        make_uint4(pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]),
                   pack_pair<T>(high[0], high[1]), pack_pair<T>(high[2], high[3]));
  }
  if (warp == 0) s.sum[lane] = make_float2(sum[0], sum[1]);
  __syncthreads();
  if (warp == 1) {
    // NOTE: Hopper's kernel adds up a thread's probabilities of a step in the order of the columns.
    sum[0] = s.sum[lane].x, sum[1] = s.sum[lane].y;
#pragma unroll
    for (const auto& r : r_s[0]) sum[0] += r[0] + r[1], sum[1] += r[2] + r[3];
    g_step.rows[lane] = {{factor[0], factor[1]}, {sum[0], sum[1]}};
    if (step * Config::kKeys + Config::kKeys >= work.keys) {
      memory.maxima[work.group * kWarp + lane] = make_float2(row_max[0], row_max[1]);
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x < memory.columns) {
    memory.stored.raise(memory.flag(work.group, step, threadIdx.x));
  }
#endif
}

}  // namespace torchweld
