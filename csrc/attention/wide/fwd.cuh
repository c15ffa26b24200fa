// Attention forward on Hopper's tensor cores, in 16 bits, for head dims above 256. The formulas and
// shapes are in attention/sm90/fwd_kernel.cuh.
//
// The left rows are rows of Q, the right rows are rows of K, and the sums are rows of V. Beside P,
// the score warpgroup publishes the factors that rescale O. O is rescaled only after the maximum of
// a row has risen by a lot (kLazy of online_softmax).
//
// If few clusters have work, several clusters share the keys of a work tile. Each of them stores
// its results in fp32, and attention_wide_combine_kernel adds the results.
#pragma once

#include "attention/block.cuh"
#include "attention/sm90/tensor_map.h"
#include "attention/wide/kernel.cuh"
#include "device/dispatch.cuh"

namespace torchweld {

// What the score warpgroup of the forward tells the other warpgroups.
template <class Config>
struct WideForwardShared {
  // factor[stage] rescales the rows of O before P V of this stage. end_factor is 1 / sum, or
  // negative if a row sees no key.
  float factor[Config::kOperandStages][Config::kCtaRows];
  float end_factor[Config::kCtaRows];
  // Whether a row of the warp has a factor other than 1.
  int rescales[Config::kOperandStages][4];
  uint64_t end;
  int split;
  typename Config::Block block;
};

template <bool kMasked>
struct WideForwardArgs {
  AttentionParams attention;
  typename AttentionVariant<kMasked>::Scale scale;
  FastDivisor group, splits;
};

// The results of the splits: for each split, the normalised fp32 rows of all heads, then the state
// of the softmax of all rows.
struct WidePartials {
  const AttentionParams& a;
  int64_t rows;

  __device__ __forceinline__ explicit WidePartials(const AttentionParams& a)
      : a(a), rows(a.sizes.batch * a.sizes.nheads * a.sizes.seqlen_q) {}
  __device__ __forceinline__ float* out(int split, int64_t row) const {
    return a.partials + (split * rows + row) * a.sizes.head_dim_v;
  }
  __device__ __forceinline__ OnlineRow& state(int split, int64_t row) const {
    float* const g_states = a.partials + a.choice.splits * rows * a.sizes.head_dim_v;
    return reinterpret_cast<OnlineRow*>(g_states)[split * rows + row];
  }
};

template <class Config>
struct WideSoftmax;

// With kSplit, several clusters share the keys of a work tile.
template <typename T_, bool kMasked_, bool kCapped_, bool kSplit_ = false>
struct WideForwardConfig : WideShape<T_, 1, AttentionWideTile::kKeys>, AttentionVariant<kMasked_> {
  using AttentionVariant<kMasked_>::kMasked;
  static constexpr bool kCapped = kCapped_, kSplit = kSplit_, kRescales = true;
  static constexpr int kWarpRows = 16, kKeys = WideForwardConfig::kColumns;
  using T = T_;
  using Block = AttentionBlockOf<kMasked, WideForwardConfig::kRows, kWarpRows>;
  using Params = WideParams<WideForwardArgs<kMasked>>;
  using Shared = WideForwardShared<WideForwardConfig>;
  using Convert = WideSoftmax<WideForwardConfig>;

#if TW_HAS_WGMMA
  static __device__ __forceinline__ void init(WideShared<WideForwardConfig>& s) {
    mbarrier_init(&s.of_kernel.end, 4);
  }
  // One warp finds the work tile of the cluster.
  static __device__ __forceinline__ void find_work(const Params& p,
                                                   WideShared<WideForwardConfig>& s) {
    const AttentionParams& a = p.args.attention;
    const uint32_t index = cluster_index(), tile = p.args.splits.divide(index);
    const AttentionTileOrder::Place place = p.schedule.place(tile);
    AttentionBlock block = {};
    const int sequence = static_cast<int>(place.sequence), q_head = static_cast<int>(place.head);
    block.batch = sequence;
    block.head = q_head;
    // The last rows come first, because they see the most keys under `causal`.
    block.first_row =
        static_cast<int>(p.schedule.tiles.divisor() - 1 - place.tile) * WideForwardConfig::kRows;
    block.rows =
        min(static_cast<int>(a.sizes.seqlen_q) - block.first_row, int{WideForwardConfig::kRows});
    if constexpr (kMasked) {
      s.of_kernel.block.template find_keys</*kParts=*/false>(a, block);
      block = s.of_kernel.block;
    } else {
      block.find_keys(a);
    }
    if (threadIdx.x % 32 != 0) return;
    if constexpr (!kMasked) s.of_kernel.block = block;
    int first = 0, last = block.keys;
    if constexpr (kSplit) {
      const int splits = static_cast<int>(p.args.splits.divisor());
      const int split_keys = divide_up(divide_up(block.keys, kKeys), splits) * kKeys;
      s.of_kernel.split = static_cast<int>(index) - static_cast<int>(tile) * splits;
      first = min(s.of_kernel.split * split_keys, block.keys);
      last = min(first + split_keys, block.keys);
    }
    const int head = static_cast<int>(p.args.group.divide(place.head));
    s.work = {sequence,          q_head,          block.first_row, head, head + 1,
              block.pad + first, block.pad + last};
  }
  // All threads of the CTA complete the work tile.
  static __device__ __forceinline__ void finish_work(const Params&,
                                                     WideShared<WideForwardConfig>& s) {
    if constexpr (kMasked) {
      auto& block = s.of_kernel.block;
      const bool may_have_gaps = block.may_have_gaps();
      __syncthreads();
      if (!may_have_gaps) return;
      block.find_gaps(threadIdx.x, WideForwardConfig::kThreads);
      __syncthreads();
    }
  }
  static __device__ __forceinline__ void wait_for_end(WideShared<WideForwardConfig>& s) {
    mbarrier_wait(&s.of_kernel.end, 0);
  }
  static __device__ __forceinline__ float end_factor(const Params&,
                                                     const WideShared<WideForwardConfig>& s,
                                                     int row) {
    return s.of_kernel.end_factor[row];
  }
  // Returns where the results of a row of the work tile's split lie.
  static __device__ __forceinline__ float* partial_row(const Params& p,
                                                       const WideShared<WideForwardConfig>& s,
                                                       int row) {
    const AttentionParams& a = p.args.attention;
    const int64_t head = int64_t{s.work.sequence} * a.sizes.nheads + s.work.left_head;
    return WidePartials(a).out(s.of_kernel.split, head * a.sizes.seqlen_q + row);
  }
  static __device__ __forceinline__ WideOutput output(const Params& p) {
    const AttentionSizes& sizes = p.args.attention.sizes;
    return {p.args.attention.out, static_cast<int>(sizes.seqlen_q),
            static_cast<int>(sizes.head_dim_v)};
  }
#endif
};

#if TW_HAS_WGMMA
// Converts S into P, with an online softmax.
template <class Config>
struct WideSoftmax {
  static constexpr int kKeys = Config::kKeys;
  using Scores = float[1][kKeys / 8][4];

  const typename Config::Params& p;
  WideShared<Config>& s;
  const int thread, warp_row;  // warp_row is the warp's first row in the work tile
  OnlineRow rows[1][2];
  float factor[1][2];

  __device__ __forceinline__ WideSoftmax(const typename Config::Params& p, WideShared<Config>& s,
                                         int thread)
      : p(p),
        s(s),
        thread(thread),
        warp_row(static_cast<int>(rank_in_cluster()) * Config::kCtaRows + thread / 32 * 16) {
    start(rows);
  }
  __device__ __forceinline__ const typename Config::Block& block() const {
    return s.of_kernel.block;
  }

  __device__ __forceinline__ void load_step(int /*row*/, int /*head*/) {}

  // Replace S by P. The first key of the step is right row `row`.
  __device__ __forceinline__ void exponentiate(float (&acc)[kKeys / 2], int row) {
    auto& r_s = reinterpret_cast<Scores&>(acc);
    const int key = row - block().pad;
    if (p.args.scale.sign != 1.f) {
#pragma unroll
      for (float& score : acc) score *= p.args.scale.sign;
    }
    if constexpr (Config::kMasked) {
      if constexpr (Config::kCapped) cap_scores</*kExact=*/false, true>(r_s, p.args.scale.cap);
      if (hides_keys<Config>(block(), warp_row, key)) {
        hide_keys<Config>(r_s, block(), warp_row, key);
      }
    } else {
      const int first_row = block().first_row + warp_row;
      if (key + kKeys > block().end_of(first_row)) {
        hide_columns(r_s, first_row + block().shift - key, block().all_keys - key);
      }
    }
    online_softmax</*kFtz=*/true, /*kLazy=*/true>(r_s, rows, factor, p.args.scale.c);
  }

  // Tell the other warpgroups the factors of the rows, and which keys no row sees.
  __device__ __forceinline__ void publish(int stage, int row) {
    const int lane = thread % 32, warp = thread / 32;
    if (lane % 4 == 0) {
      float* s_factor = s.of_kernel.factor[stage] + warp * 16 + lane / 4;
      s_factor[0] = factor[0][0];
      s_factor[8] = factor[0][1];
    }
    const bool rescales = __any_sync(~0u, factor[0][0] != 1.f || factor[0][1] != 1.f);
    if (lane == 0) s.of_kernel.rescales[stage][warp] = rescales;
    if constexpr (Config::kMasked) {
      const int key = row - block().pad + warp * 32 + lane;
      const uint32_t unseen =
          __ballot_sync(~0u, key < block().unseen || key >= block().keys ||
                                 (block().may_have_gaps() && block().gaps.contains(key)));
      if (lane == 0) s.unseen[stage][warp] = unseen;
    }
  }

  // Store lse, and 1 / sum for the other warpgroups.
  __device__ __forceinline__ void finish() {
    const int lane = thread % 32;
    const AttentionParams& a = p.args.attention;
    float empty_lse = -INFINITY;
    if constexpr (Config::kMasked && !Config::kSplit) {
      if (a.mask.sink) empty_lse = a.mask.sink[block().head];
    }
    const int64_t first_row =
        (block().batch * a.sizes.nheads + block().head) * a.sizes.seqlen_q + block().first_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8 + lane / 4;
      const float sum = quad_sum(rows[0][half].sum);
      // A row without a sum has no result in this split.
      const bool live = sees_keys(row) && (!Config::kSplit || sum != 0.f);
      const FinishedRow finished = finish_row(p.args.scale, rows[0][half].max, sum, empty_lse);
      if (lane % 4 != 0) continue;
      s.of_kernel.end_factor[thread / 32 * 16 + half * 8 + lane / 4] =
          live ? finished.factor : -1.f;
      if (row >= block().rows) continue;
      if constexpr (Config::kSplit) {
        WidePartials(a).state(s.of_kernel.split, first_row + row) = {rows[0][half].max, sum};
      } else if (a.lse) {
        a.lse[first_row + row] = live ? finished.lse : empty_lse;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.of_kernel.end);
  }

 private:
  __device__ __forceinline__ bool sees_keys(int row) const {
    if constexpr (Config::kMasked) {
      return block().begin[row] != kSeesNothing;
    } else {
      return block().first_row + row >= block().first_live;
    }
  }
};
#endif

// Adds the results of the splits of a row. A thread has four columns. The grid has a block for each
// row.
template <typename T>
__global__ void __launch_bounds__(AttentionWideTile::kDim / 4)
    attention_wide_combine_kernel(const __grid_constant__ AttentionParams a) {
  griddep_launch_dependents();
  griddep_wait();
  const int64_t row = blockIdx.x, head_of_all = row / a.sizes.seqlen_q,
                batch = head_of_all / a.sizes.nheads, head = head_of_all % a.sizes.nheads,
                index = row % a.sizes.seqlen_q;
  const WidePartials partials(a);
  const ScoreScale scale(a.scale);
  float max = -INFINITY;
  for (int split = 0; split < a.choice.splits; ++split) {
    max = fmaxf(max, partials.state(split, row).max);
  }
  const float top = max == -INFINITY ? 0.f : max;
  float sum = 0.f;
  float4 out = {0.f, 0.f, 0.f, 0.f};
  const int column = threadIdx.x * 4;
  const bool has_columns = column < a.sizes.head_dim_v;
#pragma unroll 4
  for (int split = 0; split < a.choice.splits; ++split) {
    const OnlineRow state = partials.state(split, row);
    const float weight = state.sum * exp2_approx((state.max - top) * scale.c);
    sum += weight;
    if (!has_columns) continue;
    const float4 x = *reinterpret_cast<const float4*>(partials.out(split, row) + column);
    out.x = fmaf(weight, x.x, out.x);
    out.y = fmaf(weight, x.y, out.y);
    out.z = fmaf(weight, x.z, out.z);
    out.w = fmaf(weight, x.w, out.w);
  }
  const bool live = !a.mask.row_keys(index, a.mask.sequence(batch)).empty();
  const float sink = a.mask.sink ? a.mask.sink[head] : -INFINITY;
  const FinishedRow finished = finish_row(scale, max, sum, sink);
  if (has_columns) {
    const auto scaled = [&](float x) { return live ? x * finished.factor : 0.f; };
    const uint2 words = {pack_pair<T>(scaled(out.x), scaled(out.y)),
                         pack_pair<T>(scaled(out.z), scaled(out.w))};
    *reinterpret_cast<uint2*>(a.out.row<T>(batch, head, index) + column) = words;
  }
  if (a.lse && threadIdx.x == 0) a.lse[row] = live ? finished.lse : sink;
}

template <typename T, bool kMasked>
void launch_attention_wide(const AttentionParams& a, cudaStream_t stream) {
  const AttentionSizes& sizes = a.sizes;
  const auto launch = [&](auto config) {
    using Config = decltype(config);
    const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                         int box_rows) {
      return attention_tensor_map("attention", a.dtype, t, sizes.batch, heads, rows, columns,
                                  box_rows);
    };
    const AttentionSchedule schedule(a, Config::kRows, sizeof(T));
    launch_attention_wide_kernel<Config>(
        {{map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, Config::kCtaRows)},
         {map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, Config::kPartColumns)},
         map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, Config::kSumRows),
         AttentionTileOrder(schedule.tiles, sizes.batch * sizes.nheads, sizes.nheads,
                            schedule.section),
         {a, Config::scale(a), FastDivisor(sizes.nheads / sizes.nheads_kv),
          FastDivisor(a.choice.splits)}},
        a.choice.splits, stream);
  };
  if constexpr (kMasked) {
    if (a.choice.splits > 1) {
      launch(WideForwardConfig<T, true, false, /*kSplit=*/true>());
      Grid grid(sizes.batch * sizes.nheads * sizes.seqlen_q, AttentionWideTile::kDim / 4);
      grid.overlaps = true;
      launch_kernel(attention_wide_combine_kernel<T>, grid, stream, a);
      return;
    }
    if (a.mask.softcap > 0.f) return launch(WideForwardConfig<T, true, true>());
  }
  launch(WideForwardConfig<T, kMasked, false>());
}

}  // namespace torchweld
