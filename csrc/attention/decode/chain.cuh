// The forward of attention for few query rows in the batch-invariant mode. A row gets the bits that
// Hopper's kernel (attention/sm90) gives it in a sequence of any length: its keys are taken in the
// same steps, and every element of O is one chain of additions along the keys. The chain cannot be
// split, so two kernels divide the work otherwise.
//
// attention_chain_scores_kernel has one block per step. The block computes S = Q K^T of the step
// and publishes the maxima of the step's rows. A row's probabilities need its maximum over all keys
// up to the step, so the block then waits for the maxima of the earlier steps. It stores P, rounded
// to 16 bits, and the factors by which O is rescaled.
//
// attention_chain_values_kernel has one block per 16 columns of V. One of its warps loads, and the
// other one computes O of the columns step by step: O = O * factor + P V. mma.sync and wgmma give
// the same bits if the k16 steps of a chain are the same. The kernel starts when the last blocks of
// the first kernel run, and waits for each step (BlockFlags).
//
// The chain is bound by the latency of mma.sync, about 50 cycles per 16 keys with the loads of a
// step. H200, (batch, heads, kv heads, keys, head dim), times of the wgmma tiles in parentheses:
// (1, 32, 8, 4096, 128) takes 22 us (43), (1, 32, 8, 32768, 128) 126 us (275), (8, 32, 8, 4096,
// 128) 68 us (49). What did not help:
//   The scores kernel prefetches V to L2, and the other kernel has 12 stages: 119 us instead of 126
//   with 32,768 keys, 25 instead of 22 with 4,096.
//   Resident blocks draw the steps of the scores: 141 us instead of 126.
#pragma once

#include "attention/decode/kernel.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/pipeline.cuh"

namespace torchweld {

// The work of a warp, whose keys start at the first key of a step. The steps are those of Hopper's
// kernel: they count from the padding, or from key_start, which only a single row may have.
struct ChainWork : MaskedDecodeWork {
  int unseen;  // no row sees the first `unseen` keys of [pad, pad + keys)

  using MaskedDecodeWork::MaskedDecodeWork;
  __device__ __forceinline__ void find_keys(const AttentionParams& p) {
    MaskedDecodeWork::find_keys(p);
    const int first = p.mask.pad_32(batch);
    const int origin = p.mask.key_start ? max(first, p.mask.key_start[batch]) : first;
    unseen = keys > 0 ? (pad - origin) % p.key_grid : 0;
    pad -= unseen;
    keys += unseen;
    last_begin += unseen;
    if (begin != kSeesNothing) begin += unseen, end += unseen;
    if (first_end != INT_MAX) first_end += unseen;
  }
};

// The memory between the two kernels. `groups` and `steps` are the numbers of groups and of steps
// of a group, kSlices is the number of keys in a step divided by 16.
template <int kSlices>
struct ChainMemory {
  // The factors that rescale O before the step, and the thread's sums of probabilities in the step,
  // of rows lane / 4 and lane / 4 + 8.
  struct Rows {
    float factor[2], sum[2];
  };
  struct Step {
    uint4 p[kSlices][kWarp];  // P as the operand A of mma
    Rows rows[kWarp];
  };
  static_assert(sizeof(Rows) == 16);

  Step* all_steps;  // (groups, steps)
  float2* maxima;   // (groups, kWarp): the maxima of rows lane / 4 and lane / 4 + 8
  // (groups, steps, kRows): the maximum of a row in a step, and `tag`. The call sets the words to 0
  // at the end. Memory that no call has used holds the tag with a chance of 2^-32.
  uint64_t* words;
  uint32_t tag;        // half of the number of the launch, and not 0
  BlockFlags stored;   // (groups, steps, columns): raised when a step is stored
  int steps, columns;  // `columns` is the number of groups of columns of V

  __device__ __forceinline__ Step& step(int64_t group, int step) const {
    return all_steps[group * steps + step];
  }
  __device__ __forceinline__ uint64_t* step_words(int64_t group, int step) const {
    return words + (group * steps + step) * AttentionDecodeTile::kRows;
  }
  __device__ __forceinline__ void publish(uint64_t* g_word, float max) const {
    const uint64_t word = uint64_t{tag} << 32 | __float_as_uint(max);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(g_word), "l"(word) : "memory");
  }
  static __device__ __forceinline__ uint64_t load(const uint64_t* g_word) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(g_word) : "memory");
    return word;
  }
  __device__ __forceinline__ bool is_published(uint64_t word) const { return word >> 32 == tag; }
  __device__ __forceinline__ int64_t flag(int64_t group, int step, int column) const {
    return (group * steps + step) * columns + column;
  }
};

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
  const int steps = (work.keys + kKeys - 1) / kKeys;
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
  using Value = typename Config::Value;
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
  const int steps = (work.keys + Config::kKeys - 1) / Config::kKeys;
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

template <typename T, int kDim, int kKeys, bool kLazy>
void launch_attention_chain_steps(const AttentionParams& p, cudaStream_t stream) {
  using Scores = ChainScoresConfig<T, kDim, kKeys, kLazy>;
  using Values = ChainValuesConfig<T, kKeys>;
  using Memory = typename Values::Memory;
  static_assert(sizeof(typename Memory::Step) == attention_chain_step_bytes(kKeys));
  const int steps = p.choice.splits;
  const int columns = attention_chain_columns(p.sizes.head_dim_v);
  const ScoreScale scale(p.scale);
  DecodePlan plan = DecodePlan::make(p);
  const int64_t groups = plan.blocks(p.sizes.batch) / steps;
  auto* const all_steps = reinterpret_cast<typename Memory::Step*>(p.partials);
  const Memory memory = {all_steps,
                         reinterpret_cast<float2*>(all_steps + groups * steps),
                         p.flags,
                         static_cast<uint32_t>(plan.flags.number) | 1u,
                         {p.flags + groups * steps * AttentionDecodeTile::kRows, plan.flags.number},
                         steps,
                         columns};
  Grid grid(groups * steps, Scores::kThreads, int(sizeof(typename Scores::Shared)));
  grid.overlaps = true;
  launch_kernel(attention_chain_scores_kernel<Scores>, grid, stream, p, scale, plan, memory);
  plan.splits = FastDivisor(columns);
  Grid values_grid(groups * columns, Values::kThreads, int(sizeof(typename Values::Shared)));
  values_grid.overlaps = true;
  launch_kernel(attention_chain_values_kernel<Values>, values_grid, stream, p, scale, plan, memory);
}

template <typename T>
void launch_attention_chain(const AttentionParams& p, cudaStream_t stream) {
  dispatch_index<kNumAttentionSm90Tiles>(p.choice.tile, [&](auto index) {
    constexpr AttentionSm90Tile kTile = kAttentionSm90Tiles[index.value];
    // A row of a tile in shared memory has a power of two as its number of bytes.
    constexpr int kDim = kTile.dim <= 64 ? 64 : kTile.dim <= 128 ? 128 : 256;
    if constexpr (attention_sm90_is_fastest(index.value)) {
      launch_attention_chain_steps<T, kDim, kTile.masked_keys(), (kTile.dim_v > 128)>(p, stream);
    }
  });
}

}  // namespace torchweld
