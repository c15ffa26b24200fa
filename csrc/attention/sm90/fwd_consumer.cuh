// A consumer warpgroup of attention's forward on Hopper. It has 64 query rows of each work tile.
#pragma once

#include "attention/dropout.cuh"
#include "attention/sm90/fwd_block.cuh"
#include "attention/sm90/fwd_mma.cuh"
#include "attention/sm90/fwd_zero_v.cuh"
#include "device/features.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/registers.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

enum AttentionSm90Barrier : int {
  kWarpSchedulerWg0 = 1,  // barriers 1 to 3 let one warpgroup each issue its wgmmas (ping-pong)
  kWarpgroupWg0 = 4       // barriers 4 to 6 synchronise the threads of one warpgroup each
};

#if TW_HAS_WGMMA
template <class Config>
struct AttentionSm90Consumer {
  using T = typename Config::T;
  static constexpr int kKeys = Config::kKeys;
  static constexpr bool kPingPong = !Config::kReadsScores && Config::kWarpgroups > 1;
  // kSkipsLast: a warpgroup skips tiles of keys behind the last key that its rows see. kSkipsFirst:
  // a warpgroup skips tiles of keys before the first key that its rows see.
  // NOTE: under a general mask, kernels for head dims above 128 have no free registers for skipping
  // tiles.
  static constexpr bool kSkipsLast = kPingPong && (!Config::kMasked || Config::kDim <= 128),
                        kSkipsFirst = kSkipsLast && Config::kMasked;
  // Whether a thread knows which tiles of keys need no mask and no zeros in V.
  static constexpr bool kKnowsPlain =
      Config::kMasked && !Config::kReadsScores && Config::kDim <= 128;

  const typename Config::Params& p;
  AttentionSm90Shared<Config>& s;
  const int warpgroup, thread;  // `thread` is the index of the thread in its warpgroup
  PipelineState<Config::kStages> key_state, value_state;
  PipelineState<2> work_state;
  PipelineState<Config::kQueryStages> query_state;
  AttentionSm90Registers<Config> r;
  KeyRange32 plain;  // the keys that all rows of the warpgroup see; only set if kKnowsPlain
  float slope;       // the ALiBi slope of the head, in units of the scores; only set with ALiBi
  // NOTE: after the first larger score of a work tile, a warp keeps to six_terms. Code paths that
  // alternate would evict each other from the instruction cache.
  bool few_terms;  // whether the warp uses three_terms of AttentionSmallScores

  __device__ __forceinline__ AttentionSm90Consumer(const typename Config::Params& p,
                                                   AttentionSm90Shared<Config>& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    // Warpgroup 0 issues its wgmmas first.
    if (warpgroup == Config::kWarpgroups - 1) warp_scheduler_barrier_arrive();
    while (true) {
      s.work_pipeline.wait(work_state);
      const AttentionBlock& block = s.work[work_state.stage];
      if (block.rows == 0) break;
      if constexpr (Config::kMasked) find_gaps();
      if constexpr (kKnowsPlain) find_plain_keys();
      start(r.rows);
      if constexpr (Config::kAlibi) {
        slope = p.attention.mask.alibi_slope(block.head) / p.scale.size;
      }
      if constexpr (Config::kSmallScores) {
        if (p.small.enabled) r.rows[0][0].max = r.rows[0][1].max = 0.f;
        few_terms = true;
      }
      if constexpr (Config::kReadsScores) {
        mainloop_read_scores(block);
      } else {
        mainloop(block);
      }
      epilogue(block);
      __syncwarp();
      consumer_release(&s.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  // Wait until the previous warpgroup has issued its wgmmas.
  __device__ __forceinline__ void warp_scheduler_barrier_sync() const {
    if constexpr (kPingPong) named_barrier_wait(kWarpSchedulerWg0 + warpgroup, 256);
  }
  // Let the next warpgroup issue its wgmmas.
  __device__ __forceinline__ void warp_scheduler_barrier_arrive() const {
    if constexpr (kPingPong) {
      const int next = warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive(kWarpSchedulerWg0 + next, 256);
    }
  }
  // Release a stage of a pipeline. One lane of each warp arrives. All lanes of the warp must have
  // finished with the stage.
  __device__ __forceinline__ void consumer_release(uint64_t* s_empty) const {
    if (thread % 32 == 0) mbarrier_arrive(s_empty);
  }
  // Whether the kernel, which supports dropout, drops probabilities in this call.
  __device__ __forceinline__ bool drops() const {
    return !Config::kBias || p.attention.mask.dropout.given();
  }
  __device__ __forceinline__ int warp_row() const { return warpgroup * 64 + thread / 32 * 16; }

  // Issue S = Q K^T.
  __device__ __forceinline__ void mma_s() {
    r.mma_s(shared_address(s.query[query_state.stage][warpgroup]),
            shared_address(s.key[key_state.stage]));
  }
  __device__ __forceinline__ void release_k() {
    consumer_release(&s.key_pipeline.empty[key_state.stage]);
    key_state.advance();
  }
  // Wait for V of the tile of keys that starts at `key`, then issue O += P V. If key == first_key,
  // this is the first tile of keys of the warpgroup, and the product overwrites O.
  __device__ __forceinline__ void mma_o(const AttentionBlock& block, int key, int first_key = 0) {
    s.value_pipeline.wait(value_state);
    if constexpr (Config::kMasked) {
      if (!is_plain(key)) {
        zero_v(block.keys - key, kKeys);
        if (key == 0) zero_v(0, s.work[work_state.stage].unseen);
        zero_gaps_of_v(key);
      }
    }
    r.mma_o(shared_address(s.value[value_state.stage]), key > first_key);
  }
  __device__ __forceinline__ void release_v() {
    warpgroup_fence_operand(r.acc_o);
    consumer_release(&s.value_pipeline.empty[value_state.stage]);
    value_state.advance();
  }

  // Zero rows [begin, end) of V, which no query row of the work tile sees.
  // NOTE: each warpgroup zeroes these rows itself, which avoids a barrier across warpgroups.
  __device__ __forceinline__ void zero_v(int begin, int end) const {
    if (begin >= end) return;
    zero_v_rows<Config>(s.value[value_state.stage], begin, end, thread);
    named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
  }

  // NOTE: each warpgroup finds the gaps itself, although all warpgroups find the same gaps. The
  // producer warp has no registers for this work.
  __device__ __forceinline__ void find_gaps() const {
    auto& s_block = s.work[work_state.stage];
    if (!s_block.may_have_gaps()) return;
    s_block.find_gaps(thread, 128);
    named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
  }
  // Zero the rows of V that lie in a gap between documents. The tile of keys starts at `key`.
  __device__ __forceinline__ void zero_gaps_of_v(int key) const {
    const auto& gaps = s.work[work_state.stage].gaps;
    if (!gaps.may_overlap(key, kKeys)) return;
    zero_v_gaps<Config>(s.value[value_state.stage], gaps, key, thread);
    named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
  }

  // Set `plain` for the work tile.
  // NOTE: rows that see no key don't count. Their probabilities are not used.
  __device__ __forceinline__ void find_plain_keys() {
    const auto& s_block = s.work[work_state.stage];
    plain = {0, INT_MAX};
#pragma unroll
    for (int i = warpgroup * 4; i < warpgroup * 4 + 4; ++i) {
      plain.begin = max(plain.begin, s_block.last_begin[i]);
      plain.end = min(plain.end, s_block.first_end[i]);
    }
  }
  // Whether all rows of the warpgroup see all keys of the tile of keys that starts at `key`. Such
  // keys are no gap and no padding.
  __device__ __forceinline__ bool is_plain(int key) const {
    return kKnowsPlain && key >= plain.begin && key + kKeys <= plain.end;
  }

  // Add the bias to S of the tile of keys that starts at `key`. K has been released.
  __device__ __forceinline__ void add_bias(const AttentionBlock& block, int key) {
    const AttentionBias& bias = p.attention.mask.bias;
    const float factor = 1.f / p.scale.size;
    if (bias.has_one_row()) {
      const int first = block.pad + key;
      r.add_bias_row(bias.row<T>(block.batch, block.head, 0) + first,
                     static_cast<int>(p.attention.sizes.seqlen_k) - first, factor);
    } else {
      const auto bias_state = bias_state_of(key_state);
      s.bias_pipeline.wait(bias_state);
      r.add_bias(shared_address(s.bias.tiles[bias_state.stage]), warp_row(), factor);
    }
  }
  __device__ __forceinline__ void skip_bias() {
    if (p.attention.mask.bias.has_one_row()) return;
    s.bias_pipeline.wait(bias_state_of(key_state));
    release_bias();
  }
  // NOTE: as load_s_and_softmax, this waits until the row maxima are known.
  __device__ __forceinline__ void release_bias() {
    if (p.attention.mask.bias.has_one_row()) return;
    __syncwarp();
    consumer_release(&s.bias_pipeline.empty[bias_state_of(key_state).stage]);
  }

  // Subtract the distances of the keys times the slope from S of the tile of keys that starts at
  // `key`, except for what `offsets` receives (add_alibi).
  // NOTE: if no key lies behind a row that sees it, or if all of them do, a distance costs one FMA.
  __device__ __forceinline__ void add_alibi(const AttentionBlock& block, int key,
                                            float (&offsets)[2]) {
    const int lane = thread % 32, position = block.first_row + warp_row() + block.shift - 1;
    const bool before = p.attention.mask.causal || key + kKeys <= position + 1;
    const bool behind = !before && key >= position + Config::kWarpRows - 1;
    r.add_alibi(behind ? -slope : slope, key + lane % 4 * 2 - (position + lane / 4),
                !before && !behind, offsets);
  }

  // Convert S into P for the tile of keys that starts at `key`: bias or ALiBi, soft cap, mask,
  // online softmax and dropout. Return whether O must be multiplied by o_scale.
  __device__ __forceinline__ bool softmax_step(const AttentionBlock& block, int key) {
    warpgroup_fence_operand(r.acc_s);
    if (p.scale.sign != 1.f) {
#pragma unroll
      for (float& score : r.acc_s) score *= p.scale.sign;
    }
    if constexpr (Config::kBias) add_bias(block, key);
    [[maybe_unused]] float offsets[1][2];
    if constexpr (Config::kAlibi) add_alibi(block, key, offsets[0]);
    if constexpr (Config::kMasked) {
      const auto& s_block = s.work[work_state.stage];
      const bool hides = !is_plain(key) && hides_keys<Config>(s_block, warp_row(), key);
      const auto hide = [&] { hide_keys<Config>(r.scores(), s_block, warp_row(), key); };
      if constexpr (Config::kCapped) {
        if constexpr (Config::kSmallScores) {
          if (p.small.enabled) {
            const float max_abs = max_abs_of(r.acc_s);
            const auto run = [&](const auto& exponent) {
              online_softmax_of_small(r.scores(), r.rows, p.scale.c, exponent, hides, hide);
              return false;
            };
            few_terms = few_terms && __all_sync(~0u, max_abs <= p.small.three_terms.max_score);
            if (few_terms) return run(p.small.three_terms);
            if (__all_sync(~0u, max_abs <= p.small.six_terms.max_score)) {
              return run(p.small.six_terms);
            }
          }
        }
        if (p.scale.softcap > 0.f) {
          constexpr bool kOneWay =
              Config::kSmallScores || Config::kReadsScores || Config::kDimV > 64;
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
    online_softmax<true, Config::kLazyRescale, Config::kAlibi>(r.scores(), r.rows, r.o_scale,
                                                               p.scale.c, offsets);
    if constexpr (Config::kBias) release_bias();
    if constexpr (Config::kDropout) {
      if (drops()) {
        drop_probabilities(r.scores(), WarpDropout(p.attention.mask.dropout, head_of_all(block)),
                           block.first_row + warp_row(), block.pad + key);
      }
    }
    // NOTE: the lanes of a warp vote, so that they don't diverge between wgmmas.
    return !Config::kLazyRescale ||
           __any_sync(~0u, r.o_scale[0][0] != 1.f || r.o_scale[0][1] != 1.f);
  }

  // Returns the end of the range of keys that the warpgroup's rows see, or 0 if these rows see no
  // key. The mainloop computes at least one tile of keys, even if the end is 0.
  __device__ __forceinline__ int last_key_end(const AttentionBlock& block) const {
    if constexpr (Config::kMasked) {
      const int* s_end = s.work[work_state.stage].end + warpgroup * 64 + thread % 32;
      return __reduce_max_sync(~0u, max(s_end[0], s_end[32]));
    } else {
      const int first_row = warpgroup * 64, rows = min(block.rows - first_row, 64);
      if (rows <= 0) return 0;
      return min(block.end_of(block.first_row + first_row + rows - 1), block.keys);
    }
  }
  // Returns the start of the first tile of keys in which a row of the warpgroup sees a key. Returns
  // 0 if these rows see no key before `end`.
  __device__ __forceinline__ int first_key_block(const AttentionBlock& block, int end) const {
    const int* s_begin = s.work[work_state.stage].begin + warpgroup * 64 + thread % 32;
    const int begin = __reduce_min_sync(~0u, min(s_begin[0], s_begin[32]));
    return begin < end ? begin / kKeys * kKeys : 0;
  }
  // Release K and V of a tile of keys that the warpgroup's rows don't see, and keep the ping-pong
  // order.
  __device__ __forceinline__ void skip_key_block() {
    s.key_pipeline.wait(key_state);
    warp_scheduler_barrier_sync();
    warp_scheduler_barrier_arrive();
    release_k();
    s.value_pipeline.wait(value_state);
    consumer_release(&s.value_pipeline.empty[value_state.stage]);
    value_state.advance();
    if constexpr (Config::kBias) skip_bias();
  }

  // Compute O = softmax(Q K^T) V of a work tile. S of key tile j + 1 is issued together with P V of
  // key tile j. The softmax of key tile j + 1 then overlaps with P V of key tile j.
  __device__ __forceinline__ void mainloop(const AttentionBlock& block) {
    int first_key = 0, end = block.keys;
    if constexpr (kSkipsLast) end = last_key_end(block);
    if constexpr (kSkipsFirst) first_key = first_key_block(block, end);
    for (int key = 0; key < first_key; key += kKeys) skip_key_block();
    s.query_pipeline[warpgroup].wait(query_state);
    s.key_pipeline.wait(key_state);
    warp_scheduler_barrier_sync();
    mma_s();
    warp_scheduler_barrier_arrive();
    wgmma_wait<0>();
    release_k();
    softmax_step(block, first_key);
    r.convert_p();
    int key = first_key + kKeys;
    for (; key < end; key += kKeys) {
      s.key_pipeline.wait(key_state);
      warp_scheduler_barrier_sync();
      mma_s();
      mma_o(block, key - kKeys, first_key);
      warp_scheduler_barrier_arrive();
      wgmma_wait<1>();
      release_k();
      const bool rescales = softmax_step(block, key);
      wgmma_wait<0>();
      release_v();
      if (rescales) rescale(r.out(), r.o_scale);
      r.convert_p();
    }
    mma_o(block, key - kKeys, first_key);
    finalize(block);
    wgmma_wait<0>();
    release_v();
    if constexpr (kSkipsLast) {
      for (; key < block.keys; key += kKeys) skip_key_block();
    }
  }

  // Load S of the tile of keys that starts at `key` from shared memory, then convert S into P.
  // NOTE: the stage is released only when the row maxima are known. At that point all loads from
  // the stage are complete. With an earlier release, an incomplete load could read the scores that
  // TMA writes next.
  __device__ __forceinline__ bool load_s_and_softmax(const AttentionBlock& block, int key) {
    s.key_pipeline.wait(key_state);
    r.load_s(shared_address(s.key[key_state.stage]), warp_row());
    const bool rescales = softmax_step(block, key);
    __syncwarp();
    release_k();
    return rescales;
  }
  // Compute O = softmax(S) V of a work tile, with S from global memory.
  __device__ __forceinline__ void mainloop_read_scores(const AttentionBlock& block) {
    load_s_and_softmax(block, 0);
    r.convert_p();
    int key = kKeys;
    for (; key < block.keys; key += kKeys) {
      mma_o(block, key - kKeys);
      const bool rescales = load_s_and_softmax(block, key);
      wgmma_wait<0>();
      release_v();
      if (rescales) rescale(r.out(), r.o_scale);
      r.convert_p();
    }
    mma_o(block, key - kKeys);
    finalize(block);
    wgmma_wait<0>();
    release_v();
  }

  // Set o_scale = 1 / row sum and store lse. This code runs while the last O += P V is in flight.
  // NOTE: the instructions of one row depend on each other, and no other work can be issued. The
  // code for o_scale and lse has no branches, so that the instructions of both rows overlap.
  __device__ __forceinline__ void finalize(const AttentionBlock& block) {
    const int lane = thread % 32;
    float sum[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = quad_sum(r.rows[0][half].sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = r.rows[0][half].max;
      r.live[half] = sees_keys(block, warp_row() + half * 8 + lane / 4);
      r.o_scale[0][half] = reciprocal_approx(sum[half]);
      lse[half] = fmaf(max, p.scale.size, sum[half] > 0.f ? __logf(sum[half]) : NAN);
    }
    float empty_lse = -INFINITY;
    if constexpr (Config::kMasked) {
      if (p.attention.mask.sink) {
        empty_lse = p.attention.mask.sink[block.head];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const FinishedRow finished =
              finish_row(p.scale, r.rows[0][half].max, sum[half], empty_lse);
          r.o_scale[0][half] = finished.factor;
          lse[half] = finished.lse;
        }
      }
    }
    if (Config::kDropout && drops()) {
      const auto factor = static_cast<float>(p.attention.mask.dropout.factor);
      for (float& scale : r.o_scale[0]) scale *= factor;
    }
    if (p.attention.lse && lane % 4 == 0) {
      const int rows = block.rows - warp_row();
      float* const g_lse = p.attention.lse + lse_row(block, warp_row()) + lane / 4;
      if (lane / 4 < rows) g_lse[0] = r.live[0] ? lse[0] : empty_lse;
      if (lane / 4 + 8 < rows) g_lse[8] = r.live[1] ? lse[1] : empty_lse;
    }
  }
  __device__ __forceinline__ bool sees_keys(const AttentionBlock& block, int row) const {
    if constexpr (Config::kMasked) {
      return s.work[work_state.stage].begin[row] != kSeesNothing;
    } else {
      return block.first_row + row >= block.first_live;
    }
  }

  // Store `out`. Each warp writes its 16 rows of `out` over its query rows in shared memory, then
  // copies them to global memory, 128 contiguous bytes at a time. Rows that see no key become
  // zeros.
  __device__ __forceinline__ void epilogue(const AttentionBlock& block) {
    const int lane = thread % 32, lane_row = lane % 16, chunk = lane % 8;
    char* const s_warp =
        s.query[query_state.stage][warpgroup] + thread / 32 * 16 * kSwizzleRowBytes;
    named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < Config::kDimV / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int half = j % 2;
        const float* const pair = &r.out()[0][i * 2 + j / 2][half * 2];
        const float scale = r.o_scale[0][half];
        words[j] = r.live[half] ? pack_pair<T>(pair[0] * scale, pair[1] * scale) : 0;
      }
      store_matrix_4(shared_address(s_warp) + i / 4 * Config::kQueryBoxBytes +
                         lane_row * kSwizzleRowBytes +
                         swizzled_chunk(lane_row, i % 4 * 2 + lane / 16) * 16,
                     words);
    }
    __syncwarp();
    const int dim_v = static_cast<int>(p.attention.sizes.head_dim_v);
    const AttentionOutput& out = p.attention.out;
    T* const g_out = out.row<T>(block.batch, block.head, block.first_row + warp_row());
#pragma unroll
    for (int i = 0; i < Config::kBoxesV; ++i) {
      const int column = i * AttentionSm90Tile::kBoxColumns + chunk * 8;
      uint4 chunks[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        chunks[j] = *reinterpret_cast<const uint4*>(s_warp + i * Config::kQueryBoxBytes +
                                                    row * kSwizzleRowBytes +
                                                    swizzled_chunk(row, chunk) * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        if (warp_row() + row < block.rows && column < dim_v) {
          *reinterpret_cast<uint4*>(g_out + row * out.row_stride + column) = chunks[j];
        }
      }
    }
    async_fence();
    __syncwarp();
    consumer_release(&s.query_pipeline[warpgroup].empty[query_state.stage]);
    query_state.advance();
  }

  // Returns the index in `lse` of row `row` of the work tile.
  __device__ __forceinline__ int64_t lse_row(const AttentionBlock& block, int row) const {
    const int seqlen_q = p.attention.sizes.seqlen_q;
    return int64_t{head_of_all(block)} * seqlen_q + block.first_row + row;
  }
  // Returns the index of the head, counted over all sequences.
  __device__ __forceinline__ int head_of_all(const AttentionBlock& block) const {
    const int nheads = p.attention.sizes.nheads;
    return static_cast<int>(block.batch) * nheads + static_cast<int>(block.head);
  }
};
#endif

}  // namespace torchweld
