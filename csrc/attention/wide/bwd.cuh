// Attention backward on Hopper's tensor cores, in 16 bits, for head dims above 256. Each gradient
// has a kernel of its own, because the registers of an SM hold the sums of 64 rows of one gradient:
//
//   dV = P^T dO        P = exp(scale * S - lse)
//   dK = dS^T Q        dS = scale * P * (dO V^T - delta)
//   dQ = dS K
//
// Together the kernels compute eight products instead of five. No kernel adds to another kernel's
// sums, so the gradients are reproducible. The kernels have no variant without a mask, because most
// of their steps skip the mask anyway.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sm90/tensor_map.h"
#include "attention/sync/bwd_parts.cuh"
#include "attention/wide/kernel.cuh"

namespace torchweld {

enum class WideGradient { kQuery, kKey, kValue };

struct WideNothing {};

template <class Config>
struct WideToGradient;

// The left rows are rows of Q and dO in the kernel of dQ, and rows of K and V in the other kernels.
template <typename T_, WideGradient kGradient_>
struct WideBackwardConfig
    : std::conditional_t<kGradient_ == WideGradient::kValue,
                         WideShape<T_, 1, 2 * AttentionWideTile::kBackwardRows>,
                         WideShape<T_, 2, AttentionWideTile::kBackwardRows>> {
  static constexpr WideGradient kGradient = kGradient_;
  static constexpr bool kMasked = true, kSplit = false, kRescales = false;
  static constexpr bool kLeftIsQuery = kGradient == WideGradient::kQuery;
  using T = T_;
  using Params = WideParams<MaskedBackwardArgs>;
  using Shared = WideNothing;
  using Convert = WideToGradient<WideBackwardConfig>;

#if TW_HAS_WGMMA
  static __device__ __forceinline__ void init(WideShared<WideBackwardConfig>&) {}
  // One lane finds the work tile of the cluster.
  static __device__ __forceinline__ void find_work(const Params& p,
                                                   WideShared<WideBackwardConfig>& s) {
    constexpr int kPad = kAttentionBackwardRowPad, kRows = WideBackwardConfig::kRows,
                  kColumns = WideBackwardConfig::kColumns;
    if (threadIdx.x != 0) return;
    const AttentionSizes& sizes = p.args.params.sizes;
    const int group = static_cast<int>(sizes.nheads / sizes.nheads_kv);
    const AttentionTileOrder::Place place = p.schedule.place(cluster_index());
    const int left_head = static_cast<int>(place.head), tile = static_cast<int>(place.tile);
    WideWork work = {static_cast<int>(place.sequence), left_head, 0, 0, 0, 0, 0};
    if constexpr (kLeftIsQuery) {
      // The last rows come first, because they see the most keys under `causal`.
      work.left_row = (static_cast<int>(p.schedule.tiles.divisor()) - 1 - tile) * kRows;
      int begin = INT_MAX, end = 0;
#pragma unroll
      for (int i = 0; i < kRows / kPad; ++i) {
        const BlockMask& mask = p.args.group_of(work.sequence, work.left_row + i * kPad);
        begin = min(begin, mask.begin);
        end = max(end, mask.end);
      }
      work.head = left_head / group;
      work.end_head = work.head + 1;
      if (end > 0) work.row = begin, work.end_row = end;
    } else {
      work.left_row = tile * kRows;
      const KeyTileMask mask = p.args.key_tile_of(work.sequence, tile);
      work.head = left_head * group;
      work.end_head = work.head + group;
      if (mask.keys.end > 0) {
        // All steps lie in the padded rows, whose number is a multiple of kColumns.
        work.row = mask.first_group * kPad / kColumns * kColumns;
        work.end_row = min(static_cast<int>(sizes.seqlen_q), (mask.last_group + 1) * kPad);
      }
    }
    s.work = work;
  }
  static __device__ __forceinline__ void finish_work(const Params&,
                                                     WideShared<WideBackwardConfig>&) {}
  // The output overwrites left[0]. Without steps, its load may still be in flight. The last operand
  // is full only after the last product that reads left[0].
  static __device__ __forceinline__ void wait_for_end(WideShared<WideBackwardConfig>& s) {
    mbarrier_wait(&s.left_full, 0);
  }
  static __device__ __forceinline__ float end_factor(const Params& p,
                                                     const WideShared<WideBackwardConfig>&, int) {
    return kGradient == WideGradient::kValue ? 1.f / (1 << kProbabilityShift<T>)
                                             : p.args.params.scale;
  }
  static __device__ __forceinline__ WideOutput output(const Params& p) {
    const AttentionBackwardParams& a = p.args.params;
    const auto of = [&](const AttentionOutput& tensor, int64_t rows, int64_t columns) {
      return WideOutput{tensor, static_cast<int>(rows), static_cast<int>(columns)};
    };
    if constexpr (kLeftIsQuery) return of(a.dquery, a.sizes.seqlen_q, a.sizes.head_dim);
    return kGradient == WideGradient::kKey ? of(a.dkey, a.sizes.seqlen_k, a.sizes.head_dim)
                                           : of(a.dvalue, a.sizes.seqlen_k, a.sizes.head_dim_v);
  }
#endif
};

#if TW_HAS_WGMMA
// Converts S, and dP if there is one, into P or dS. In the kernel of dQ, the rows of the scores are
// query rows. In the other kernels they are keys, and the columns are query rows. A thread has two
// rows of the scores, and two adjacent columns of every 8 columns.
template <class Config>
struct WideToGradient {
  using T = typename Config::T;
  static constexpr bool kLeftIsQuery = Config::kLeftIsQuery;
  static constexpr int kColumns = Config::kColumns, kPairs = kColumns / 8;
  static constexpr int kGroups = kLeftIsQuery ? 1 : kColumns / kAttentionBackwardRowPad;
  // Probabilities are multiplied by 2^kProbabilityShift, and g_delta by its inverse (BackwardArgs).
  static constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
  // The number of pairs of query rows of a thread: its two rows, or its columns.
  static constexpr int kStats = kLeftIsQuery ? 1 : kPairs;

  const typename Config::Params& p;
  WideShared<Config>& s;
  const int thread;
  const int left_row;                 // the first of the thread's two rows
  float2 lse[kStats], delta[kStats];  // of the thread's query rows
  int2 begin, end;                    // the keys that the thread's two query rows see
  BlockMask groups[kGroups];          // what the query rows of the scores see, 64 rows in a group

  __device__ __forceinline__ WideToGradient(const typename Config::Params& p, WideShared<Config>& s,
                                            int thread)
      : p(p),
        s(s),
        thread(thread),
        left_row(s.work.left_row + static_cast<int>(rank_in_cluster()) * Config::kCtaRows +
                 thread / 32 * 16 + thread % 32 / 4) {
    if constexpr (kLeftIsQuery) {
      const int64_t at = head_row(s.work.left_head) + left_row;
      lse[0] = {p.args.g_lse[at], p.args.g_lse[at + 8]};
      delta[0] = {p.args.g_delta[at], p.args.g_delta[at + 8]};
      const KeyRange32 low = p.args.live_of(s.work.sequence, left_row),
                       high = p.args.live_of(s.work.sequence, left_row + 8);
      begin = {low.begin, high.begin};
      end = {low.end, high.end};
      groups[0] = p.args.group_of(s.work.sequence, left_row);
    }
  }

  // Load what the step needs to know about its query rows.
  __device__ __forceinline__ void load_step(int row, int head) {
    if constexpr (kLeftIsQuery) return;
    const int64_t at = head_row(head) + row + thread % 4 * 2;
#pragma unroll
    for (int n = 0; n < kStats; ++n) {
      lse[n] = *reinterpret_cast<const float2*>(p.args.g_lse + at + n * 8);
      if constexpr (Config::kProducts > 1) {
        delta[n] = *reinterpret_cast<const float2*>(p.args.g_delta + at + n * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      groups[i] = p.args.group_of(s.work.sequence, row + i * int{kAttentionBackwardRowPad});
    }
  }

  // Replace S by P.
  __device__ __forceinline__ void exponentiate(float (&x)[kColumns / 2], int row) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      x[i] = exponential<T>(fmaf(x[i], p.args.score_factor, stat(lse, i)));
    }
    if (hides(row)) hide(x, row);
  }
  // Replace P by dS = P * (dP - delta).
  __device__ __forceinline__ void multiply(float (&x)[kColumns / 2],
                                           const float (&dp)[kColumns / 2], int row) const {
    const bool is_edge = hides(row);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float ds = x[i] * fmaf(dp[i], kUnshift, -stat(delta, i));
      // A hidden score has P = 0, but its dP or delta may be NaN.
      x[i] = is_edge && x[i] == 0.f ? 0.f : ds;
    }
  }

  // Tell the other warpgroups which right rows may be NaN although their operand is 0: keys behind
  // the last key that the rows of the work tile see, or query rows that see no key.
  __device__ __forceinline__ void publish(int stage, int row) {
    const int warp = thread / 32;
    if (thread % 32 != 0 || warp * 32 >= kColumns) return;
    uint32_t unseen;
    if constexpr (kLeftIsQuery) {
      const int seen = s.work.end_row - row - warp * 32;
      unseen = seen >= 32 ? 0 : seen <= 0 ? ~0u : ~0u << seen;
    } else {
      const uint64_t live = kGroups > 1 && warp >= 2 ? groups[kGroups - 1].live : groups[0].live;
      unseen = ~static_cast<uint32_t>(live >> warp % 2 * 32);
    }
    s.unseen[stage][warp] = unseen;
  }

  __device__ __forceinline__ void finish() {}

 private:
  __device__ __forceinline__ int64_t head_row(int head) const {
    return (int64_t{s.work.sequence} * p.args.params.sizes.nheads + head) * p.args.rows;
  }
  // Returns the value that belongs to the query row of score i.
  static __device__ __forceinline__ float stat(const float2 (&stats)[kStats], int i) {
    const float2 two = stats[kLeftIsQuery ? 0 : i / 4];
    return (kLeftIsQuery ? i / 2 % 2 : i % 2) ? two.y : two.x;
  }

  // Whether the mask hides a score of this CTA.
  __device__ __forceinline__ bool hides(int row) const {
    if constexpr (kLeftIsQuery) {
      return row < groups[0].last_begin || row + kColumns > groups[0].first_end;
    } else {
      const int key = s.work.left_row + static_cast<int>(rank_in_cluster()) * Config::kCtaRows;
      bool hides = false;
#pragma unroll
      for (const BlockMask& group : groups) {
        hides |= key < group.last_begin || key + Config::kCtaRows > group.first_end;
      }
      return hides;
    }
  }
  __device__ __forceinline__ void hide(float (&x)[kColumns / 2], int row) const {
    if constexpr (kLeftIsQuery) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        const int key = row + i / 4 * 8 + thread % 4 * 2 + i % 2;
        const bool sees = i / 2 % 2 ? key >= begin.y && key < end.y : key >= begin.x && key < end.x;
        if (!sees) x[i] = 0.f;
      }
    } else {
      const KeyRange32* g_live = &p.args.live_of(s.work.sequence, row + thread % 4 * 2);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int4 two = *reinterpret_cast<const int4*>(g_live + n * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = left_row + i / 2 * 8;
          const bool sees = i % 2 ? key >= two.z && key < two.w : key >= two.x && key < two.y;
          if (!sees) x[n * 4 + i] = 0.f;
        }
      }
    }
  }
};
#endif

// Launches the kernels of dV, dK and dQ, one after the other.
template <typename T>
void launch_attention_backward_wide(const MaskedBackwardArgs& args, cudaStream_t stream) {
  using Tile = AttentionWideTile;
  const AttentionBackwardParams& a = args.params;
  const AttentionSizes& sizes = a.sizes;
  const int64_t group = sizes.nheads / sizes.nheads_kv;
  const auto map = [&](const AttentionTensor& t, int64_t columns, bool of_query, int box_rows) {
    return attention_tensor_map("attention_backward", a.dtype, t, sizes.batch,
                                of_query ? sizes.nheads : sizes.nheads_kv,
                                of_query ? sizes.seqlen_q : sizes.seqlen_k, columns, box_rows);
  };
  const auto query = [&](int rows) { return map(a.query, sizes.head_dim, true, rows); };
  const auto dout = [&](int rows) { return map(a.dout, sizes.head_dim_v, true, rows); };
  const auto key = [&](int rows) { return map(a.key, sizes.head_dim, false, rows); };
  const auto value = [&](int rows) { return map(a.value, sizes.head_dim_v, false, rows); };
  // The heads of a section read at most kCacheBytes of right rows.
  const auto schedule = [&](int64_t rows, int64_t heads, int64_t right_bytes, int64_t at_once) {
    constexpr int64_t kCacheBytes = 16 << 20;
    const int64_t fit = std::max<int64_t>(1, kCacheBytes / std::max<int64_t>(1, right_bytes));
    return AttentionTileOrder(divide_up(rows, Tile::kRows), sizes.batch * heads, heads,
                              fit * at_once);
  };
  const int64_t row_bytes = (sizes.head_dim + sizes.head_dim_v) * int64_t{sizeof(T)};
  const AttentionTileOrder by_key =
      schedule(sizes.seqlen_k, sizes.nheads_kv, group * sizes.seqlen_q * row_bytes, 1);
  const AttentionTileOrder by_query =
      schedule(sizes.seqlen_q, sizes.nheads, sizes.seqlen_k * row_bytes, group);
  constexpr int kLeft = Tile::kCtaRows;
  using Value = WideBackwardConfig<T, WideGradient::kValue>;
  launch_attention_wide_kernel<Value>(
      {{key(kLeft)}, {query(Value::kPartColumns)}, dout(Value::kSumRows), by_key, args}, 1, stream);
  using Key = WideBackwardConfig<T, WideGradient::kKey>;
  launch_attention_wide_kernel<Key>({{key(kLeft), value(kLeft)},
                                     {query(Key::kPartColumns), dout(Key::kPartColumns)},
                                     query(Key::kSumRows),
                                     by_key,
                                     args},
                                    1, stream);
  using Query = WideBackwardConfig<T, WideGradient::kQuery>;
  launch_attention_wide_kernel<Query>({{query(kLeft), dout(kLeft)},
                                       {key(Query::kPartColumns), value(Query::kPartColumns)},
                                       key(Query::kSumRows),
                                       by_query,
                                       args},
                                      1, stream);
}

}  // namespace torchweld
