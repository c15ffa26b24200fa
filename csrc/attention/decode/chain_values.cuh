// The second kernel of the chain engine (decode/chain.cuh): O, column by column.
#pragma once

#include "attention/decode/chain_memory.cuh"
#include "attention/score_scale.h"
#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/sm90/pipeline.cuh"

namespace torchweld {

template <typename T_, int kKeys_>
struct ChainValuesConfig {
  using T = T_;
  static constexpr int kKeys = kKeys_, kSlices = kKeys / 16, kStages = 6;
  static constexpr int kColumns = kAttentionChainColumns;
  static constexpr int kThreads = 2 * kWarp;
  using Memory = ChainMemory<kSlices>;
  using Value = SharedTile<T, kKeys, kColumns>;
  struct Shared {
    typename Memory::Step steps[kStages];
    Value values[kStages];
    PipelineBarriers<kStages> pipeline;
  };
};

#if TW_HAS_WGMMA
// Returns the number of consecutive steps from `step` on, at most 32, that are stored. Clears their
// flags. One warp calls this function.
template <typename Memory>
__device__ __forceinline__ int count_stored(const Memory& memory, const ChainWork& work, int step,
                                            int steps) {
  const int lane = threadIdx.x % kWarp;
  const int64_t flag = memory.flag(work.group, step + lane, work.split);
  const bool stored = step + lane < steps && memory.stored.is_set(flag);
  const int count = __ffs(~__ballot_sync(~0u, stored));  // 0 if all lanes have a stored step
  const int found = count == 0 ? kWarp : count - 1;
  if (lane < found) memory.stored.clear(flag);
  __syncwarp();
  return found;
}

// Loads the steps of a group, and the columns [first_column, first_column + kColumns) of V. Keys
// that no row sees become zeros and are not read. One warp calls this function.
template <typename Config>
__device__ __forceinline__ void load_chain_values(const AttentionParams& p, const ChainWork& work,
                                                  const typename Config::Memory& memory,
                                                  typename Config::Shared& s, int first_column) {
  using T = typename Config::T;
  using Value = typename Config::Value;
  constexpr int kKeys = Config::kKeys;
  const int lane = threadIdx.x % kWarp, column = first_column + lane % 2 * 8;
  const bool has_column = column < static_cast<int>(p.sizes.head_dim_v);
  const T* g_value = matrix_of<T>(p.value, work.batch, work.kv_head, work.pad + lane / 2) + column;
  PipelineState<Config::kStages> state;
  const int steps = work.steps(kKeys);
  int stored = 0;  // the number of steps that are known to be stored
  for (int step = 0, first = 0; step < steps; ++step, first += kKeys) {
    while (step == stored) stored += count_stored(memory, work, stored, steps);
    auto& s_step = s.steps[state.stage];
    if (lane == 0) {
      uint64_t* s_full = s.pipeline.acquire(state, sizeof(s_step));
      global_async_fence();
      bulk_load(&s_step, &memory.step(work.group, step), sizeof(s_step), s_full);
    }
    __syncwarp();
    const uint32_t s_value = shared_address(s.values[state.stage].s_data);
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      const int row = slice * 16 + lane / 2, key = first + row;
      copy_async_16_if(s_value + Value::offset(row, lane % 2), g_value,
                       has_column && key >= work.unseen && key < work.keys);
      g_value += 16 * p.value.row_stride;
    }
    copy_async_arrive(&s.pipeline.full[state.stage]);
    state.advance();
  }
}
#endif

// The operands of a step in a thread's registers.
template <typename Config>
struct ChainFragments {
  uint32_t p[Config::kSlices][4], v[Config::kSlices][4];
  typename Config::Memory::Rows rows;

  __device__ __forceinline__ void read(const typename Config::Memory::Step& s_step,
                                       const typename Config::Value& s_value, int lane) {
    const uint32_t s_rows =
        shared_address(s_value.s_data) + Config::Value::offset(lane % 16, lane / 16);
    rows = s_step.rows[lane];
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      const uint4 words = s_step.p[slice][lane];
      p[slice][0] = words.x, p[slice][1] = words.y, p[slice][2] = words.z, p[slice][3] = words.w;
      load_matrix_4_transposed(v[slice], s_rows + slice * 16 * Config::Value::kRowBytes);
    }
  }
};

// The sums of a thread: O of two m16n8 tiles, and the probabilities of its two rows.
template <typename Config>
struct ChainSums {
  float out[2][4], sum[2];

  __device__ __forceinline__ void add(const ChainFragments<Config>& f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = f.rows.factor[half];
      sum[half] = fmaf(sum[half], factor, f.rows.sum[half]);
#pragma unroll
      for (auto& tile : out) tile[2 * half] *= factor, tile[2 * half + 1] *= factor;
    }
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      mma_16816<typename Config::T>(out[0], f.p[slice], f.v[slice][0], f.v[slice][1]);
      mma_16816<typename Config::T>(out[1], f.p[slice], f.v[slice][2], f.v[slice][3]);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void attention_chain_values_kernel(
    const __grid_constant__ AttentionParams p, const ScoreScale scale,
    const __grid_constant__ DecodePlan plan, const typename Config::Memory memory) {
#if TW_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  const int lane = threadIdx.x % kWarp, dim_v = static_cast<int>(p.sizes.head_dim_v);
  if (threadIdx.x == 0) {
    s.pipeline.init(1, kWarp + 1);
    mbarrier_init_fence();
  }
  ChainWork work(plan);
  work.find_keys(p);
  const int first_column = work.split * Config::kColumns;
  __syncthreads();
  if (threadIdx.x >= kWarp) {
    load_chain_values<Config>(p, work, memory, s, first_column);
    griddep_wait();
    return;
  }

  // NOTE: a step is multiplied while the next one is read from shared memory. In one loop, ptxas
  // would move each read to its product, and a step would take twice as long.
  ChainFragments<Config> fragments[2];
  ChainSums<Config> sums = {};
  PipelineState<Config::kStages> read_state, free_state;
  const auto read = [&](ChainFragments<Config>& f) {
    s.pipeline.wait(read_state);
    f.read(s.steps[read_state.stage], s.values[read_state.stage], lane);
    read_state.advance();
  };
  const auto multiply = [&](const ChainFragments<Config>& f) {
    sums.add(f);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.pipeline.empty[free_state.stage]);
    free_state.advance();
  };
  const int steps = work.steps(Config::kKeys);
  if (steps > 0) read(fragments[0]);
  for (int step = 0; step < steps; step += 2) {
    if (step + 1 < steps) read(fragments[1]);
    multiply(fragments[0]);
    if (step + 1 == steps) break;
    if (step + 2 < steps) read(fragments[0]);
    multiply(fragments[1]);
  }
  griddep_wait();
  griddep_launch_dependents();

  if (work.split == 0) {
    uint64_t* const g_words = memory.step_words(work.group, 0);
    for (int i = lane; i < steps * AttentionDecodeTile::kRows; i += kWarp) g_words[i] = 0;
  }
  const float2 max =
      work.keys > 0 ? memory.maxima[work.group * kWarp + lane] : make_float2(-INFINITY, -INFINITY);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    const float total = quad_sum(sums.sum[half]), row_max = half == 0 ? max.x : max.y;
    const bool live = __shfl_sync(~0u, work.begin, row) != kSeesNothing;
    if (row >= work.rows) continue;
    const DecodeWork::Row query_row = work.row(row);
    FinishedRow finished = {reciprocal_approx(total),
                            fmaf(row_max, scale.size, total > 0.f ? __logf(total) : NAN)};
    float empty_lse = -INFINITY;
    if (p.mask.sink) {
      empty_lse = p.mask.sink[query_row.head];
      finished = finish_row(scale, row_max, total, empty_lse);
    }
    if (p.lse && work.split == 0 && lane % 4 == 0) {
      p.lse[work.first_lse_row(p.sizes) + row] = live ? finished.lse : empty_lse;
    }
    T* const g_out = p.out.row<T>(work.batch, query_row.head, query_row.index);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = first_column + n * 8 + lane % 4 * 2;
      const float (&r)[4] = sums.out[n];
      const uint32_t pair =
          pack_pair<T>(r[2 * half] * finished.factor, r[2 * half + 1] * finished.factor);
      if (column < dim_v) *reinterpret_cast<uint32_t*>(g_out + column) = live ? pair : 0u;
    }
  }
#endif
}

}  // namespace torchweld
