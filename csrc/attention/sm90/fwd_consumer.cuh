// What a consumer warpgroup of attention's forward on Hopper does.
#pragma once

#include "attention/sm90/fwd_block.cuh"
#include "attention/sm90/fwd_rows.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/registers.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// What a consumer warpgroup does. Named barriers: 1 to 3 are the turns at the tensor cores, 4 to 6
// the warpgroups' own.
template <class Config>
struct AttentionSm90Consumer {
  using T = typename Config::T;
  static constexpr int kKeys = Config::kKeys, kTurn = 1, kOwn = 4;
  static constexpr bool kTurns = !Config::kReadsScores && Config::kWarpgroups > 1;
  // Wide heads under a mask have no registers left to skip steps.
  static constexpr bool kSkips = kTurns && (!Config::kMasked || Config::kDim <= 128),
                        kSkipsFirst = kSkips && Config::kMasked;

  const typename Config::Params& p;
  AttentionSm90Shared<Config>& s;
  const int warpgroup, thread;  // of the warpgroup
  PipelineState<Config::kStages> at_key, at_value;
  PipelineState<2> at_work;
  PipelineState<Config::kQueryStages> at_query;
  AttentionSm90Rows<Config> r;

  __device__ __forceinline__ AttentionSm90Consumer(const typename Config::Params& p,
                                                   AttentionSm90Shared<Config>& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    if (warpgroup == Config::kWarpgroups - 1) pass_turn();  // the first
    while (true) {
      s.works.wait(at_work);
      const AttentionBlock& block = s.work[at_work.stage];
      if (block.rows == 0) break;
      start(r.rows);
      if constexpr (Config::kSmallScores) {
        if (p.small.given) r.rows[0][0].max = r.rows[0][1].max = 0.f;
      }
      if constexpr (Config::kReadsScores) {
        walk_scores(block);
      } else {
        walk_products(block);
      }
      store(block);
      __syncwarp();
      release(&s.works.empty[at_work.stage]);
      at_work.advance();
    }
  }

 private:
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kTurns) named_barrier_wait(kTurn + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTurns) {
      named_barrier_arrive(kTurn + (warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1), 256);
    }
  }
  // A warp that is done with a stage, or lets it pass.
  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    if (thread % 32 == 0) mbarrier_arrive(s_empty);
  }
  __device__ __forceinline__ int warp_row() const { return warpgroup * 64 + thread / 32 * 16; }

  __device__ __forceinline__ void multiply_keys() {
    r.multiply_keys(shared_address(s.query[at_query.stage][warpgroup]),
                    shared_address(s.key[at_key.stage]));
  }
  __device__ __forceinline__ void release_keys() {
    release(&s.keys.empty[at_key.stage]);
    at_key.advance();
  }
  // The values of the step that begins at `key`; the warpgroup's first step is at `first`.
  __device__ __forceinline__ void multiply_values(const AttentionBlock& block, int key,
                                                  int first = 0) {
    s.values.wait(at_value);
    if constexpr (Config::kMasked) {
      clear_values(block.keys - key, kKeys);
      if constexpr (Config::kReadsScores) {
        if (key == 0) clear_values(0, s.work[at_work.stage].unseen);
      }
    }
    r.multiply_values(shared_address(s.value[at_value.stage]), key > first);
  }
  __device__ __forceinline__ void release_values() {
    warpgroup_fence_operand(r.out_sums);
    release(&s.values.empty[at_value.stage]);
    at_value.advance();
  }

  // Values [begin, end) that no row of the tile sees may be NaN, and their probabilities are 0.
  // NOTE: every warpgroup clears them for itself, which spares a barrier of all.
  __device__ __forceinline__ void clear_values(int begin, int end) const {
    if (begin >= end) return;
    char* const s_value = s.value[at_value.stage];
    for (int piece = thread; piece < (end - begin) * Config::kLinesV * 8; piece += 128) {
      const int line = piece / 8, stretch = line / (end - begin);
      const int row = begin + line - stretch * (end - begin);
      *reinterpret_cast<uint4*>(s_value + stretch * Config::kKeyStretch + row * kSwizzleRowBytes +
                                piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    async_fence();
    named_barrier_wait(kOwn + warpgroup, 128);
  }

  // The scores of the step that begins at `key` become probabilities. True: earlier results are to
  // be rescaled.
  __device__ __forceinline__ bool attend(const AttentionBlock& block, int key) {
    warpgroup_fence_operand(r.score_sums);
    if (p.scale.sign != 1.f) {
#pragma unroll
      for (float& score : r.score_sums) score *= p.scale.sign;
    }
    if constexpr (Config::kMasked) {
      const auto& s_block = s.work[at_work.stage];
      const bool hides = hides_keys<Config>(s_block, warp_row(), key);
      const auto hide = [&] { hide_keys<Config>(r.scores(), s_block, warp_row(), key); };
      if constexpr (Config::kCapped) {
        if constexpr (Config::kSmallScores) {
          if (p.small.given) {
            const float largest = largest_size(r.score_sums);
            const auto take = [&](const auto& exponent) {
              if (!__all_sync(~0u, largest <= exponent.most)) return false;
              online_softmax_of_small(r.scores(), r.rows, p.scale.c, exponent, hides, hide);
              return true;
            };
            if (take(p.small.short_one) || take(p.small.long_one)) return false;
          }
        }
        if (p.scale.softcap > 0.f) {
          constexpr bool kOneWay = Config::kSmallScores || Config::kDimV > 128;
          cap_scores</*kExact=*/false, kOneWay>(r.scores(), p.scale.cap);
        }
      }
      if (hides) hide();
    } else {
      const int first_row = block.first_row + warp_row();
      if (key + kKeys > block.end_of(first_row)) {
        hide_columns(r.scores(), first_row + block.shift - key, block.all_keys - key);
      }
    }
    online_softmax<true, Config::kLazy>(r.scores(), r.rows, r.factor, p.scale.c);
    // NOTE: the vote is for whole warps, so that nobody diverges between products.
    return !Config::kLazy || __any_sync(~0u, r.factor[0][0] != 1.f || r.factor[0][1] != 1.f);
  }

  // The warpgroup's rows see keys before this one alone. One step is there always.
  __device__ __forceinline__ int own_end(const AttentionBlock& block) const {
    const int first_row = warpgroup * 64, rows = min(block.rows - first_row, 64);
    if (rows <= 0) return 0;
    return min(block.end_of(block.first_row + first_row + rows - 1), block.keys);
  }
  // The begin of the first step before `end` of which they see a key.
  __device__ __forceinline__ int own_begin(const AttentionBlock& block, int end) const {
    const int* s_begin = s.work[at_work.stage].begin + warpgroup * 64 + thread % 32;
    const int begin = __reduce_min_sync(~0u, min(s_begin[0], s_begin[32]));
    return begin < end ? begin / kKeys * kKeys : 0;
  }
  // A step of which the warpgroup's rows see no key: its turn and its stages go on.
  __device__ __forceinline__ void skip_step() {
    s.keys.wait(at_key);
    wait_turn();
    pass_turn();
    release_keys();
    s.values.wait(at_value);
    release(&s.values.empty[at_value.stage]);
    at_value.advance();
  }

  __device__ __forceinline__ void walk_products(const AttentionBlock& block) {
    int first = 0, end = block.keys;
    if constexpr (kSkips) end = own_end(block);
    if constexpr (kSkipsFirst) first = own_begin(block, end);
    for (int key = 0; key < first; key += kKeys) skip_step();
    s.queries[warpgroup].wait(at_query);
    s.keys.wait(at_key);
    wait_turn();
    multiply_keys();
    pass_turn();
    wgmma_wait<0>();
    release_keys();
    attend(block, first);
    r.round_probabilities();
    int key = first + kKeys;
    for (; key < end; key += kKeys) {
      s.keys.wait(at_key);
      wait_turn();
      multiply_keys();
      multiply_values(block, key - kKeys, first);
      pass_turn();
      wgmma_wait<1>();
      release_keys();
      const bool rescales = attend(block, key);
      wgmma_wait<0>();
      release_values();
      if (rescales) rescale(r.out(), r.factor);
      r.round_probabilities();
    }
    multiply_values(block, key - kKeys, first);
    finish(block);
    wgmma_wait<0>();
    release_values();
    if constexpr (kSkips) {
      for (; key < block.keys; key += kKeys) skip_step();
    }
  }

  // The same where the scores are read.
  // NOTE: a stage is given back behind the maxima of its scores. The tensor cores read shared
  // memory first, and a load that was issued but not done would find the next scores there.
  __device__ __forceinline__ bool attend_read_scores(const AttentionBlock& block, int key) {
    s.keys.wait(at_key);
    r.read_scores(shared_address(s.key[at_key.stage]), warp_row());
    const bool rescales = attend(block, key);
    __syncwarp();
    release_keys();
    return rescales;
  }
  __device__ __forceinline__ void walk_scores(const AttentionBlock& block) {
    attend_read_scores(block, 0);
    r.round_probabilities();
    int key = kKeys;
    for (; key < block.keys; key += kKeys) {
      multiply_values(block, key - kKeys);
      const bool rescales = attend_read_scores(block, key);
      wgmma_wait<0>();
      release_values();
      if (rescales) rescale(r.out(), r.factor);
      r.round_probabilities();
    }
    multiply_values(block, key - kKeys);
    finish(block);
    wgmma_wait<0>();
    release_values();
  }

  // What the rows' sums are to be multiplied with, and lse.
  // NOTE: free of branches. These instructions wait for each other, and there is little else to
  // issue beside them.
  __device__ __forceinline__ void finish(const AttentionBlock& block) {
    const int lane = thread % 32;
    float sum[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = quad_sum(r.rows[0][half].sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = r.rows[0][half].max;
      r.live[half] = sees_keys(block, warp_row() + half * 8 + lane / 4);
      r.factor[0][half] = reciprocal_approx(sum[half]);
      lse[half] = fmaf(max, p.scale.size, sum[half] > 0.f ? __logf(sum[half]) : NAN);
    }
    float none = -INFINITY;
    if constexpr (Config::kMasked) {
      if (p.attention.mask.sink) {
        none = p.attention.mask.sink[block.head];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const FinishedRow finished = finish_row(p.scale, r.rows[0][half].max, sum[half], none);
          r.factor[0][half] = finished.factor;
          lse[half] = finished.lse;
        }
      }
    }
    if (p.attention.lse && lane % 4 == 0) {
      const int rows = block.rows - warp_row();
      float* const g_lse = p.attention.lse + row_of(block, warp_row()) + lane / 4;
      if (lane / 4 < rows) g_lse[0] = r.live[0] ? lse[0] : none;
      if (lane / 4 + 8 < rows) g_lse[8] = r.live[1] ? lse[1] : none;
    }
  }
  __device__ __forceinline__ bool sees_keys(const AttentionBlock& block, int row) const {
    if constexpr (Config::kMasked) {
      return s.work[at_work.stage].begin[row] != kSeesNothing;
    } else {
      return block.first_row + row >= block.first_live;
    }
  }

  // A warp's rows go through where its queries were, so that it writes whole lines. Those that see
  // no key are zeros.
  __device__ __forceinline__ void store(const AttentionBlock& block) {
    const int lane = thread % 32, line = lane % 16, piece = lane % 8;
    char* const s_warp = s.query[at_query.stage][warpgroup] + thread / 32 * 16 * kSwizzleRowBytes;
    named_barrier_wait(kOwn + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < Config::kDimV / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int half = j % 2;
        const float* const pair = &r.out()[0][i * 2 + j / 2][half * 2];
        const float factor = r.factor[0][half];
        words[j] = r.live[half] ? pack_pair<T>(pair[0] * factor, pair[1] * factor) : 0;
      }
      store_matrix_4(shared_address(s_warp) + i / 4 * Config::kQueryStretch +
                         line * kSwizzleRowBytes + swizzled_chunk(line, i % 4 * 2 + lane / 16) * 16,
                     words);
    }
    __syncwarp();
    const int dim_v = static_cast<int>(p.attention.sizes.head_dim_v);
    T* const g_out = static_cast<T*>(p.attention.out) + row_of(block, warp_row()) * dim_v;
#pragma unroll
    for (int i = 0; i < Config::kLinesV; ++i) {
      const int column = i * AttentionSm90Tile::kLineElems + piece * 8;
      uint4 pieces[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        pieces[j] = *reinterpret_cast<const uint4*>(s_warp + i * Config::kQueryStretch +
                                                    row * kSwizzleRowBytes +
                                                    swizzled_chunk(row, piece) * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        if (warp_row() + row < block.rows && column < dim_v) {
          *reinterpret_cast<uint4*>(g_out + row * dim_v + column) = pieces[j];
        }
      }
    }
    async_fence();
    __syncwarp();
    release(&s.queries[warpgroup].empty[at_query.stage]);
    at_query.advance();
  }

  // Of the results, where `row` is one of the block's.
  __device__ __forceinline__ int64_t row_of(const AttentionBlock& block, int row) const {
    const AttentionSizes& sizes = p.attention.sizes;
    const int head = static_cast<int>(block.batch) * static_cast<int>(sizes.nheads) +
                     static_cast<int>(block.head);
    return static_cast<int64_t>(head) * static_cast<int>(sizes.seqlen_q) + block.first_row + row;
  }
};
#endif

}  // namespace torchweld
