// The scores of a consumer warpgroup in attention's backward on Hopper: masks, S -> P, dP -> dS,
// the store of dQ, and the epilogue of dK and dV.
#pragma once

#include <climits>

#include "attention/cap.cuh"
#include "attention/dropout.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"
#include "device/sm90/registers.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The scores of a warpgroup. S^T has 64 keys, starting at first_key(), and kScoreRows query rows,
// starting at first_row(). In every 8 query rows, a thread holds 4 scores: 2 adjacent rows times 2
// keys. The 2 keys are 8 apart.
template <typename Config>
struct BackwardSm90Scores {
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Shared = typename Config::Shared;
  using State = PipelineState<Config::kStages>;
  using DoutState = PipelineState<Config::kDoutStages>;
  static constexpr int kRows = Config::kRows, kScoreRows = Config::kScoreRows;
  static constexpr int kRowSlices = kScoreRows / 16;
  using ScoreAcc = float[kScoreRows / 2];
  using ScoreOperand = uint32_t[kRowSlices][4];  // P^T or dS^T as operand A of wgmma

  const Params& p;
  Shared& s;
  const int warpgroup;
  PipelineState<kWorkStages> work_state;  // the stage and the phase of the current work tile

  __device__ __forceinline__ BackwardSm90Scores(const Params& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  // Whether this thread issues the warpgroup's TMA stores.
  static __device__ __forceinline__ bool leads() { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ const typename Config::WorkTile& work() const {
    return s.work[work_state.stage];
  }
  __device__ __forceinline__ int first_key() const { return Config::first_key(work(), warpgroup); }
  __device__ __forceinline__ int first_row() const { return Config::first_row(warpgroup); }
  __device__ __forceinline__ int seqlen_q() const {
    return static_cast<int>(p.args.params.mask.seqlen_q);
  }
  __device__ __forceinline__ int seqlen_k() const {
    return static_cast<int>(p.args.params.mask.seqlen_k);
  }
  // Keys outside of [first_live(), end_live()) are padding, or no query row sees them.
  __device__ __forceinline__ int first_live() const {
    if constexpr (Config::kMasked) {
      return work().span.begin;
    } else {
      return work().span.pad;
    }
  }
  __device__ __forceinline__ int end_live() const {
    if constexpr (Config::kMasked) {
      return work().span.end;
    } else {
      return seqlen_k();
    }
  }

  // Release a stage of a pipeline. One lane of each warp arrives when all lanes of the warp have
  // finished with the stage. In a cluster, the lane arrives at the barriers of both CTAs: the
  // producers of both CTAs fill the stage together, so both must wait for the warp.
  __device__ __forceinline__ void consumer_release(uint64_t* s_empty) const {
    __syncwarp();
    if (lane() == 0) {
      mbarrier_arrive(s_empty);
      if constexpr (Config::kCtas == 2) mbarrier_arrive_at(s_empty, Config::cta_rank() ^ 1);
    }
  }

  // Read what the producer wrote about a query tile.
  __device__ __forceinline__ BackwardQueryTile query_tile(const State& state) const {
    if constexpr (Config::kMasked) {
      const int first = first_key(), end = first + 64;
      const BlockMask& group = s.seen[state.stage].group;
      return {0, 0, first < group.last_begin || end > group.first_end};
    } else {
      return unpack_query_tile(s.query_tiles[state.stage], warpgroup);
    }
  }

  // Wait for Q, and zero the rows that see no key. Return whether the mask hides some of the
  // scores.
  __device__ __forceinline__ bool wait_for_q(const State& state,
                                             const DoutState& dout_state) const {
    s.q_pipeline.wait(state);
    const BackwardQueryTile tile = query_tile(state);
    zero_unseen_rows(state, dout_state, tile.unseen_rows);
    return tile.is_edge;
  }

  // Load lse or delta of the thread's rows.
  using RowStats = float2[kScoreRows / 8];
  __device__ __forceinline__ void load_stats(RowStats& r, const float* s_stats) const {
    const float* s_lane = s_stats + first_row() + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      r[n] = *reinterpret_cast<const float2*>(s_lane + n * 8);
    }
  }

  // Load lse while S is computed, if there are registers for lse.
  __device__ __forceinline__ void load_early_lse(RowStats& r_lse, const State& state) const {
    if constexpr (Config::kEarlyLse) load_stats(r_lse, s.lse_of(state.stage));
  }

  // Wait for S; dP may stay in flight. Compute P = exp(scale * S + bias - lse) *
  // 2^kProbabilityShift, or P = 0 for hidden scores. p16 receives P in 16 bits. acc_s receives dS /
  // (dP - delta), which is P, or P * (1 - tanh^2) with a soft cap. With dropout, p16 is 0 and acc_s
  // is -P for the dropped probabilities.
  __device__ __forceinline__ void s_to_p(ScoreOperand& p16, ScoreAcc& acc_s, RowStats& r_lse,
                                         const State& state, const DoutState& dout_state,
                                         bool is_edge) const {
    wgmma_wait<1>();
    warpgroup_fence_operand(acc_s);
    if (capped()) {
      exponentiate_capped(p16, acc_s, state, is_edge);
    } else {
      s_to_exponents(acc_s, r_lse, state, dout_state, is_edge);
#pragma unroll
      for (float& x : acc_s) x = exponential<T>(x);
      if constexpr (Config::kDropout) {
        if (drops()) {
          const auto& seen = s.seen[state.stage];
          mark_dropped(acc_s, WarpDropout(p.args.params.mask.dropout, seen.head),
                       seen.first_row + first_row(), first_key() + warp() * 16);
          pack_kept(p16, acc_s);
        } else {
          pack(p16, acc_s);
        }
      } else {
        pack(p16, acc_s);
      }
    }
  }

  // Add the bias to the exponents in acc_s. If it has rows, it is in the stage of dO that the
  // warpgroup has waited for, and is transposed as store_ds transposes dS.
  __device__ __forceinline__ void add_bias(ScoreAcc& acc_s, const State& state,
                                           const DoutState& dout_state) const {
    const AttentionBias& bias = p.args.params.mask.bias;
    if (bias.has_one_row()) {
      const int nheads = static_cast<int>(p.args.params.sizes.nheads), sequence = work().sequence;
      const T* g_row = bias.row<T>(sequence, s.seen[state.stage].head - sequence * nheads, 0);
      const int key = first_key() + warp() * 16 + lane() / 4;
      const auto of = [&](int key) { return key < seqlen_k() ? to_float(g_row[key]) : 0.f; };
      const float low = of(key) * kLog2e, high = of(key + 8) * kLog2e;
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) acc_s[i] += i / 2 % 2 ? high : low;
      return;
    }
    const uint32_t s_lane = shared_address(s.bias.tiles[dout_state.stage]) +
                            warpgroup * Config::kBiasBoxBytes +
                            transposed_lane_offset(lane(), 0, warp());
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      uint32_t words[4];
      load_matrix_4_transposed(words, s_lane + slice * 16 * kSwizzleRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(words[i]);
        float* const to = acc_s + slice * 8 + 2 * i;
        to[0] = fmaf(pair.x, kLog2e, to[0]);
        to[1] = fmaf(pair.y, kLog2e, to[1]);
      }
    }
  }

  // Copy the warpgroup's dS of a query tile, which it has written to the buffer at s_ds, to
  // params.ds, if the call has params.ds. wait_for_ds_copies<n>() waits until all copies but the
  // last n have read their buffers.
  __device__ __forceinline__ void copy_ds(uint32_t s_ds, const State& state) const {
    if (!p.args.params.ds.data) return;
    named_barrier_wait(kConsumerWg0 + warpgroup, 128);
    if (!leads()) return;
    const auto& seen = s.seen[state.stage];
    const int nheads = static_cast<int>(p.args.params.sizes.nheads);
    tma_store(p.of_bias.ds, s_ds + warpgroup * Config::kDsBoxBytes, first_key(), seen.first_row,
              seen.head - work().sequence * nheads, work().sequence);
    tma_commit();
  }
  template <int kCount>
  __device__ __forceinline__ void wait_for_ds_copies() const {
    if (Config::kBias && leads()) tma_wait_read<kCount>();
  }

  // Wait for dO. Initialise acc_dp with -delta of each score's query row, unless a stat slice or
  // undo_dropout subtracts delta. delta in shared memory is in stage delta_stage. It has a factor
  // of 2^-kProbabilityShift, which kScale removes. The product later adds dP^T.
  __device__ __forceinline__ void init_dp(ScoreAcc& acc_dp, const DoutState& dout_state,
                                          int delta_stage) const {
    s.dout_pipeline.wait(dout_state);
    if constexpr (Config::kStatSlice || (Config::kDropout && !Config::kBias)) {
      discard_accumulators(acc_dp);
    } else if (Config::kBias && drops()) {
#pragma unroll
      for (float& x : acc_dp) x = 0.f;
    } else {
      constexpr float kScale = -(1 << kProbabilityShift<T>);
      RowStats delta;
      load_stats(delta, s.delta_of(delta_stage));
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) {
        acc_dp[i] = kScale * (i % 2 ? delta[i / 4].y : delta[i / 4].x);
      }
    }
  }

  // Whether the kernel, which supports dropout, drops probabilities in this call.
  __device__ __forceinline__ bool drops() const {
    return !Config::kBias || p.args.params.mask.dropout.given();
  }

  // With dropout, replace dP in acc_dp by the gradient of the probability before the dropout, minus
  // delta. Replace acc_s by its absolute values.
  __device__ __forceinline__ void undo_dropout(ScoreAcc& acc_s, ScoreAcc& acc_dp,
                                               const State& state) const {
    constexpr float kShift = 1 << kProbabilityShift<T>;
    const float* s_delta = s.stats[state.stage].delta + first_row() + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(s_delta + n * 8);
#pragma unroll
      for (int i = n * 4; i < n * 4 + 4; ++i) {
        const float dp = acc_s[i] < 0.f ? 0.f : acc_dp[i] * p.args.kept_factor;
        acc_dp[i] = fmaf(i % 2 ? delta.y : delta.x, -kShift, dp);
        acc_s[i] = fabsf(acc_s[i]);
      }
    }
  }

  // Compute dS = P * (dP - delta). acc_s holds the factor that s_to_p computed. kUnshift removes
  // 2^kProbabilityShift from this factor. acc_dp holds dP - delta.
  static __device__ __forceinline__ void dp_to_ds(ScoreOperand& ds16, const ScoreAcc& acc_s,
                                                  ScoreAcc& acc_dp, bool is_edge) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) acc_dp[i] = acc_s[i] * (acc_dp[i] * kUnshift);
    if (is_edge) {
      // A hidden score has P = 0, but its dP or delta may be NaN.
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) acc_dp[i] = acc_s[i] == 0.f ? 0.f : acc_dp[i];
    }
    pack(ds16, acc_dp);
  }

  // Zero the rows of a tile for which should_zero(row) is true. Both warpgroups call this function.
  template <int kBoxes, int kBoxBytes, typename ShouldZero>
  static __device__ __forceinline__ void zero_rows(char* s_tile, int rows,
                                                   const ShouldZero& should_zero) {
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < rows * 8; i += kBackwardConsumerThreads) {
      if (!should_zero(i / 8)) continue;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        *reinterpret_cast<uint4*>(s_tile + box * kBoxBytes + i * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Zero the rows of Q and dO that see no key. P and dS are 0 for these rows, but Q and dO may be
  // NaN, and 0 * NaN would make dV and dK NaN.
  __device__ __forceinline__ void zero_unseen_rows(const State& state, const DoutState& dout_state,
                                                   int unseen_rows) const {
    const auto zero = [&](int rows, const auto& should_zero) {
      s.dout_pipeline.wait(dout_state);
      zero_rows<Config::kBoxes, Config::kQueryBoxBytes>(s.q[state.stage], rows, should_zero);
      zero_rows<Config::kBoxesV, Config::kQueryBoxBytes>(s.dout[dout_state.stage], rows,
                                                         should_zero);
      async_fence();
      named_barrier_wait<kUnseenZeroed, kBackwardConsumerThreads>();
    };
    if constexpr (Config::kMasked) {
      const uint64_t live = s.seen[state.stage].group.live;
      if (live != ~uint64_t{0}) zero(kRows, [&](int row) { return !(live >> row & 1); });
    } else {
      if (unseen_rows > 0) zero(unseen_rows, [](int) { return true; });
    }
  }

  // Store the warpgroup's slice of dQ^T to the shared memory of a dQ store warp.
  // NOTE: async_fence takes long directly after these stores, so signal_dq_store is called after
  // the next wgmmas are issued.
  template <int kAcc>
  __device__ __forceinline__ void store_dq(float (&acc_dq)[kAcc], int store_warp) const {
    named_barrier_wait(kDqEmptyWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
    store_dq_slice(s.dq[store_warp][warpgroup], acc_dq);
  }
  __device__ __forceinline__ void signal_dq_store(int store_warp) const {
    async_fence();
    named_barrier_arrive(kDqFullWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
  }
  template <int kAcc>
  static __device__ __forceinline__ void store_dq_slice(float* s_slice, float (&acc_dq)[kAcc]) {
    warpgroup_fence_operand(acc_dq);
    float4* s_dq = reinterpret_cast<float4*>(s_slice) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kAcc; i += 4) {
      s_dq[i / 4 * 128] = make_float4(acc_dq[i], acc_dq[i + 1], acc_dq[i + 2], acc_dq[i + 3]);
    }
  }

  // Scale the warpgroup's columns of dK or dV and store them. In the gradient, the warpgroup's
  // columns start at box `first_box`. If the KV head has several parts, the function stores fp32
  // partials. Otherwise it writes 16-bit values through shared memory: the warpgroup's first box is
  // at s_box, and the next box is box_bytes further on. row_in_box is the row of the warpgroup's
  // first key in the box.
  template <bool kIsDv, int kAcc>
  __device__ __forceinline__ void epilogue_dkv(const float (&acc)[kAcc], uint32_t s_box,
                                               int row_in_box, int first_box, const TensorMap& map,
                                               float scale,
                                               int box_bytes = Config::kKeyBoxBytes) const {
    const int key = first_key() + warp() * 16 + lane() / 4;
    const auto scale_of = [&](int key) {
      return key >= first_live() && (!Config::kMasked || key < end_live()) ? scale : 0.f;
    };
    const float low = scale_of(key), high = scale_of(key + 8);
    const auto scaled = [](float x, float by) { return by == 0.f ? 0.f : x * by; };
    if (p.args.group_parts > 1) {
      float4* const g_partial =
          p.args.part_sums(work().part, first_key() / 64, kIsDv, Config::kDim) +
          first_box * 8 * 128;
#pragma unroll
      for (int n = 0; n < kAcc / 4; ++n) {
        const float* x = acc + n * 4;
        g_partial[n * 128 + threadIdx.x % 128] = make_float4(
            scaled(x[0], low), scaled(x[1], low), scaled(x[2], high), scaled(x[3], high));
      }
      return;
    }
    const int row = row_in_box + warp() * 16 + lane() % 16;
#pragma unroll
    for (int n = 0; n < kAcc / 8; ++n) {
      const float* x = acc + n * 8;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = i % 2 ? high : low;
        words[i] = pack_pair<T>(scaled(x[2 * i], by), scaled(x[2 * i + 1], by));
      }
      const int chunk = n % 4 * 2 + lane() / 16;
      store_matrix_4(
          s_box + n / 4 * box_bytes + row * kSwizzleRowBytes + (swizzled_chunk(row, chunk) << 4),
          words);
    }
    async_fence();
    named_barrier_wait(kConsumerWg0 + warpgroup, 128);
    if (leads() && first_key() < seqlen_k()) {
#pragma unroll
      for (int i = 0; i < (kAcc + 31) / 32; ++i) {
        tma_store(map, s_box + i * box_bytes + row_in_box * kSwizzleRowBytes,
                  (first_box + i) * Config::kBoxColumns, first_key(), work().head_kv,
                  work().sequence);
      }
      tma_commit();
    }
  }

  // Replace S^T in acc_s by the exponents of P^T, which are -inf for hidden scores. There is no
  // soft cap. With kEarlyLse, r_lse holds lse.
  __device__ __forceinline__ void s_to_exponents(ScoreAcc& acc_s, RowStats& r_lse,
                                                 const State& state, const DoutState& dout_state,
                                                 bool is_edge) const {
    if constexpr (!Config::kEarlyLse && !Config::kStatSlice) {
      load_stats(r_lse, s.lse_of(state.stage));
    }
    if constexpr (Config::kAlibi) {
      subtract_alibi(acc_s, state);
    } else {
      subtract_lse(acc_s, r_lse);
    }
    if constexpr (Config::kBias) add_bias(acc_s, state, dout_state);
    if (is_edge) hide(acc_s, state, -INFINITY);
  }

  // Set the values of the hidden scores to `hidden`. The values have the layout of the scores.
  __device__ __forceinline__ void hide(ScoreAcc& values, const State& state, float hidden) const {
    if constexpr (Config::kMasked) {
      const int key = key_in_work_tile();
#pragma unroll
      for (int n = 0; n < kScoreRows / 8; ++n) {
        const uint32_t seen = seen_keys(state, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!sees(seen, i, key)) values[n * 4 + i] = hidden;
        }
      }
    } else {
      const int first_key = this->first_key() + warp() * 16 + lane() / 4;
      const int row = query_tile(state).tile * kRows + first_row() + lane() % 4 * 2,
                end = seqlen_q() - row;
      int begin[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first_key + i * 8;
        int first = work().span.first_row;
        if (p.args.params.mask.causal) first = max(first, key - (seqlen_k() - seqlen_q()));
        if (key < work().span.pad || key >= seqlen_k()) first = seqlen_q();
        begin[i] = first - row;
      }
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) {
        const int in_tile = i / 4 * 8 + i % 2;
        if (in_tile < begin[i / 2 % 2] || in_tile >= end) values[i] = hidden;
      }
    }
  }

 private:
  static __device__ __forceinline__ void pack(ScoreOperand& to, const ScoreAcc& from) {
#pragma unroll
    for (int i = 0; i < kScoreRows / 4; ++i) {
      to[i / 4][i % 4] = pack_pair<T>(from[2 * i], from[2 * i + 1]);
    }
  }
  // Round P to 16 bits. Negative values are dropped probabilities.
  static __device__ __forceinline__ void pack_kept(ScoreOperand& to, const ScoreAcc& from) {
    const auto kept = [](float x) { return x < 0.f ? 0.f : x; };
#pragma unroll
    for (int i = 0; i < kScoreRows / 4; ++i) {
      to[i / 4][i % 4] = pack_pair<T>(kept(from[2 * i]), kept(from[2 * i + 1]));
    }
  }

  // Whether the scores have a soft cap.
  __device__ __forceinline__ bool capped() const {
    if constexpr (Config::kCapped || Config::kStatSlice || Config::kDropout || Config::kAlibi ||
                  !Config::kMasked) {
      return Config::kCapped;
    } else {
      return p.args.params.mask.softcap > 0.f;
    }
  }

  // Subtract lse from the scaled scores in acc_s.
  __device__ __forceinline__ void subtract_lse(ScoreAcc& acc_s, const RowStats& lse) const {
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) {
      if constexpr (Config::kStatSlice) {
        acc_s[i] *= p.args.score_factor;
      } else {
        acc_s[i] = fmaf(acc_s[i], p.args.score_factor, i % 2 ? lse[i / 4].y : lse[i / 4].x);
      }
    }
  }

  // Multiply S^T minus lse by score_factor, and subtract slope * |position - key|.
  // NOTE: as in the forward, a distance costs one FMA if no key lies behind a row that sees it.
  __device__ __forceinline__ void subtract_alibi(ScoreAcc& acc_s, const State& state) const {
    static_assert(Config::kStatSlice);
    const auto& seen = s.seen[state.stage];
    const int key = first_key() + warp() * 16, position = seen.position + first_row();
    const bool before = p.args.params.mask.causal || key + 15 <= position;
    const bool behind = !before && key >= position + kScoreRows - 1;
    const float factor = (behind ? seen.slope : -seen.slope) * kLog2e;
    const int distance = position + lane() % 4 * 2 - (key + lane() / 4);
    const float first[2] = {factor * static_cast<float>(distance),
                            factor * static_cast<float>(distance - 8)};
    const auto for_scores = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) {
        body(acc_s[i], fmaf(factor, static_cast<float>(i / 4 * 8 + i % 2), first[i / 2 % 2]));
      }
    };
    const float score_factor = p.args.score_factor;
    if (before || behind) {
      for_scores([&](float& x, float alibi) { x = fmaf(x, score_factor, alibi); });
    } else {
      for_scores([&](float& x, float alibi) { x = fmaf(x, score_factor, -fabsf(alibi)); });
    }
  }

  // Convert S^T with a soft cap: p16 receives P^T, and acc_s receives P^T * (1 - tanh^2).
  __device__ __forceinline__ void exponentiate_capped(ScoreOperand& p16, ScoreAcc& acc_s,
                                                      const State& state, bool is_edge) const {
    if constexpr (Config::kMasked && !Config::kStatSlice) {
      cap_scores</*kExact=*/false>(acc_s, p.args.cap);
      is_edge ? exponentiate_tanh<true>(p16, acc_s, state)
              : exponentiate_tanh<false>(p16, acc_s, state);
    }
  }
  template <bool kHides>
  __device__ __forceinline__ void exponentiate_tanh(ScoreOperand& p16, ScoreAcc& acc_s,
                                                    const State& state) const {
    const float factor = p.args.params.mask.softcap * p.args.score_factor;
    const float* s_lse = s.lse_of(state.stage) + first_row() + lane() % 4 * 2;
    const int key = key_in_work_tile();
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(s_lse + n * 8);
      uint32_t seen;
      if constexpr (kHides) seen = seen_keys(state, n);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float* x = acc_s + n * 4 + i;
        float probability[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          probability[j] = exponential<T>(fmaf(x[j], factor, j ? lse.y : lse.x));
          const float sloped = probability[j] * fmaf(-x[j], x[j], 1.f);
          const bool hidden = kHides && !sees(seen, i + j, key);
          if (hidden) probability[j] = 0.f;
          x[j] = hidden ? 0.f : sloped;
        }
        p16[n / 2][n % 2 * 2 + i / 2] = pack_pair<T>(probability[0], probability[1]);
      }
    }
  }

  // The index of the thread's first key in the work tile.
  __device__ __forceinline__ int key_in_work_tile() const {
    return first_key() - work().first_key + warp() * 16 + lane() / 4;
  }
  // Rows 8 n to 8 n + 7 of the scores include two rows of this thread. Returns their word of
  // BackwardSm90Seen::keys.
  __device__ __forceinline__ uint32_t seen_keys(const State& state, int n) const {
    return s.seen[state.stage].keys[first_row() / 2 + n * 4 + lane() % 4];
  }
  // Whether the score in register i (0 to 3) is visible, that is, whether the row of the score sees
  // the key of the score. `key` is the index of the thread's first key in the work tile.
  static __device__ __forceinline__ bool sees(uint32_t seen, int i, int key) {
    const unsigned row = seen >> i % 2 * 16, first = row & 0xff, count = row >> 8 & 0xff;
    return key + i / 2 * 8 - first < count;
  }
};
#endif

}  // namespace torchweld
