// A consumer warpgroup of attention's backward on Hopper, for the kernels that use one CTA: the
// mainloops and the order of the matmuls. The warpgroup has 64 keys of each work tile.
//
// mainloop is for head dims up to 128. mainloop_unequal is for head dims up to 192 of Q and K, and
// up to 128 of V. In mainloop_unequal, dK and dV need 160 registers per thread. Therefore S, dQ and
// dP use the same 32 registers one after the other, and P and dS use the same 16 registers. Only
// the 16-bit P is left when dS is computed. dQ of a query tile is computed one step late, so that a
// warpgroup rarely waits for the other warpgroup's dS. A step is:
//
//   S = K Q^T | P = exp(S) | dV += P^T dO, previous dQ | dP = V dO^T | dS | dK += dS^T Q
//
// dQ^T has three slices of 64 columns. Each warpgroup computes one slice in every step, and the
// third slice in every second step. For (4, 16, 4096, 192/128) causal on an H200, the kernel needs
// 0.60 of the time of an earlier kernel on two CTAs, which padded dK and dQ to 256 columns.
#pragma once

#include "attention/sm90/bwd_mma.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct BackwardSm90Consumer {
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Shared = typename Config::Shared;
  using Scores = BackwardSm90Scores<Config>;
  using Mma = BackwardSm90Mma<Config>;
  using State = typename Scores::State;
  using DoutState = typename Scores::DoutState;
  using DsState = PipelineState<Config::kDsStages>;
  using ScoreAcc = typename Scores::ScoreAcc;
  using ScoreOperand = typename Scores::ScoreOperand;
  using RowStats = typename Scores::RowStats;
  using DkAcc = typename Mma::DkAcc;
  using DvAcc = typename Mma::DvAcc;
  using DqAcc = typename Mma::DqAcc;

  const Params& p;
  Shared& s;
  const int warpgroup;
  Scores scores{p, s, warpgroup};
  Mma mma{s, warpgroup};
  uint32_t s_ds_lane;  // the address of this lane's stmatrix row; not used under a general mask

  // Process all work tiles of the CTA.
  __device__ __forceinline__ void run() {
    if constexpr (!Config::kMasked) {
      s_ds_lane = ds_lane_address(threadIdx.x);
      asm volatile("" : "+r"(s_ds_lane));  // keep the address in one register
    }
    if constexpr (!Config::kUnequal) {
      if (scores.leads()) s.held_ds_buffers[warpgroup] = 0;
    }
    if (warpgroup == 1) named_barrier_arrive(kExpWg0, kBackwardConsumerThreads);
    for (int tiles = 0;; ++tiles) {
      scores.work_state = pipeline_state_of<kWorkStages>(tiles);
      s.work_pipeline.wait(scores.work_state);
      if (scores.work().is_end()) break;
      process_work_tile();
      scores.consumer_release(&s.work_pipeline.empty[scores.work_state.stage]);
    }
    if constexpr (!Config::kUnequal) {
      if (scores.leads()) tma_wait_read<0>();
    }
    // Warpgroup 1 has arrived at kExpWg0 once more than warpgroup 0 has waited there, so warpgroup
    // 0 waits once more. Then the warpgroup waits until the dQ store warps have read the dQ buffers
    // of this warpgroup.
    if (warpgroup == 0) named_barrier_wait(kExpWg0, kBackwardConsumerThreads);
    for (int warp = 0; warp < Config::kDqStoreWarps; ++warp) {
      backward_sm90_close_dq_buffer(warp, warpgroup);
    }
  }

 private:
  // `step` is the index of a query tile. It counts the query tiles of all work tiles of the CTA.
  // Returns the stage of Q and dO of this query tile.
  static __device__ __forceinline__ State state_of(int step) {
    return pipeline_state_of<Config::kStages>(step);
  }
  // Returns the stage of dO of query tile `step`.
  static __device__ __forceinline__ DoutState dout_state_of(int step) {
    return pipeline_state_of<Config::kDoutStages>(step);
  }
  // Returns the stage of dS of query tile `step`.
  static __device__ __forceinline__ DsState ds_state_of(int step) {
    return pipeline_state_of<Config::kDsStages>(step);
  }

  // Only one warpgroup at a time computes exponentials. Wait until this warpgroup may do so.
  __device__ __forceinline__ void wait_for_exponentials() const {
    if (warpgroup == 0) {
      named_barrier_wait<kExpWg0, kBackwardConsumerThreads>();
    } else {
      named_barrier_wait<kExpWg0 + 1, kBackwardConsumerThreads>();
    }
  }
  // Let the other warpgroup compute exponentials.
  __device__ __forceinline__ void release_exponentials() const {
    if (warpgroup == 0) {
      named_barrier_arrive<kExpWg0 + 1, kBackwardConsumerThreads>();
    } else {
      named_barrier_arrive<kExpWg0, kBackwardConsumerThreads>();
    }
  }

  __device__ __forceinline__ void process_work_tile() {
    DkAcc acc_dk = {};
    DvAcc acc_dv = {};
    if constexpr (Config::kUnequal) {
      wait_for_kv();
      if (scores.work().steps() > 0) {
        mainloop_unequal(acc_dk, acc_dv, scores.work().first_step, scores.work().steps());
      }
    } else if (scores.work().steps() > 0) {
      mainloop(acc_dk, acc_dv, scores.work().first_step, scores.work().steps());
    } else {
      // NOTE: consumers that released K or V before the producer acquired them would be a phase
      // ahead, and the producer would wait forever.
      wait_for_kv();
      release_ds_buffers(scores.work().first_step);
      named_barrier_wait(kConsumerWg0 + warpgroup, 128);
      scores.consumer_release(&s.k_pipeline.empty[0]);
    }
    // A warpgroup reads only its own 64 keys of V, so the warpgroup's dV may overwrite these keys
    // at once. Both warpgroups read all of K and dS, so dK may overwrite one of them only after the
    // barrier.
    float dv_scale = 1.f / (1 << kProbabilityShift<T>);
    if constexpr (Config::kDropout) dv_scale *= p.args.kept_factor;
    scores.template epilogue_dkv<true>(acc_dv, mma.s_v, warpgroup * 64, 0, p.dvalue, dv_scale);
    scores.template wait_for_ds_copies<0>();
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    if constexpr (Config::kUnequal) {
      scores.template epilogue_dkv<false>(acc_dk, mma.s_k, warpgroup * 64, 0, p.dkey,
                                          p.args.params.scale);
    } else {
      scores.template epilogue_dkv<false>(acc_dk, mma.s_ds + warpgroup * Config::kDsBoxBytes, 0, 0,
                                          p.dkey, p.args.params.scale, Config::kDsBytes);
    }
    if (!scores.leads()) return;
    if constexpr (Config::kUnequal) {
      tma_wait_read<0>();  // dV and dK have been read
      mbarrier_arrive(&s.v_pipeline.empty[0]);
      mbarrier_arrive(&s.k_pipeline.empty[0]);
    } else {
      tma_wait_read<1>();  // dV has been read
      mbarrier_arrive(&s.v_pipeline.empty[0]);
      s.held_ds_buffers[warpgroup] = min(scores.work().steps(), Config::kStages);
    }
  }
  // Wait for K and V of the work tile.
  __device__ __forceinline__ void wait_for_kv() {
    const PipelineState<1> kv_state = backward_sm90_kv_state(scores.work_state);
    s.k_pipeline.wait(kv_state);
    s.v_pipeline.wait(kv_state);
  }

  // Zero the keys of K that no query row sees. dS of these keys is 0, but K may be NaN, and 0 * NaN
  // would make dQ NaN. TMA has already filled rows behind the last key with zeros.
  __device__ __forceinline__ void zero_unseen_keys() const {
    const int begin = scores.first_live() - scores.work().first_key,
              end = scores.end_live() - scores.work().first_key;
    if (begin <= 0 && (!Config::kMasked || end >= Config::kKeys)) return;
    scores.template zero_rows<Config::kBoxes, Config::kKeyBoxBytes>(
        s.k, Config::kKeys, [&](int key) { return key < begin || key >= end; });
    async_fence();
    named_barrier_wait<kUnseenZeroed, kBackwardConsumerThreads>();
  }

  // Returns the address of this lane's stmatrix row in the first buffer of dS.
  __device__ __forceinline__ uint32_t ds_lane_address(int thread) const {
    return mma.s_ds + warpgroup * Config::kDsBoxBytes +
           transposed_lane_offset(thread % 32, 0, thread / 32 % 4);
  }

  // Store dS to shared memory, for the dQ product.
  __device__ __forceinline__ void store_ds(const ScoreOperand& ds16, const DsState& state) const {
    uint32_t s_lane;
    if constexpr (Config::kMasked) {
      // NOTE: the kernel for a general mask has no free register for the address. The asm keeps the
      // compiler from computing the address before the loop.
      int thread = threadIdx.x;
      asm volatile("" : "+r"(thread));
      s_lane = ds_lane_address(thread);
    } else {
      s_lane = s_ds_lane;
    }
    s_lane += state.stage * Config::kDsBytes;
#pragma unroll
    for (int slice = 0; slice < Scores::kRowSlices; ++slice) {
      store_matrix_4_transposed(s_lane + slice * 16 * kSwizzleRowBytes, ds16[slice]);
    }
  }

  // Releases the dS buffers of the previous work tile's last query tiles. Its dK overwrote them, so
  // this first waits until TMA has read dK. `step` is the next query tile.
  __device__ __forceinline__ void release_ds_buffers(int step) {
    if (scores.leads()) {
      tma_wait_read<0>();
      for (int i = 1; i <= s.held_ds_buffers[warpgroup]; ++i) {
        mbarrier_arrive(&s.ds_pipeline.empty[state_of(step - i).stage], 4);
      }
      s.held_ds_buffers[warpgroup] = 0;
    }
  }

  // Process `left` query tiles, starting with query tile `step`.
  __device__ __forceinline__ void mainloop(DkAcc& acc_dk, DvAcc& acc_dv, int step, int left) {
    ScoreAcc acc_s, acc_dp;
    DqAcc acc_dq;
    RowStats r_lse;
    const PipelineState<1> kv_state = backward_sm90_kv_state(scores.work_state);
    s.k_pipeline.wait(kv_state);
    zero_unseen_keys();
    release_ds_buffers(step);
    // From the third query tile on, the iteration for a tile also computes dQ of the tile two steps
    // before. The two dQ store warps receive the dQ of alternate query tiles.
    static_assert(Config::kDqStoreWarps == 2);
    const bool has_two = left > 1;
    left -= 2;
#pragma unroll 1
    for (const int first_end = step + (has_two ? 2 : 1); step < first_end; ++step) {
      const bool is_edge = scores.wait_for_q(state_of(step), dout_state_of(step));
      mma.issue_s(acc_s, state_of(step));
      scores.load_early_lse(r_lse, state_of(step));
      s.v_pipeline.wait(kv_state);
      // NOTE: S may stay in flight, so this waits for nothing. Without it ptxas would insert a wait
      // for S before issue_dp writes the accumulators of dP (C7517).
      wgmma_wait<1>();
      scores.init_dp(acc_dp, dout_state_of(step), state_of(step).stage);
      mma.issue_dp(acc_dp, dout_state_of(step));
      issue_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, step, is_edge);
    }
    // NOTE: when an iteration starts, all wgmmas whose results the iteration reads are complete. If
    // such a wgmma were in flight, ptxas would insert a wait directly after the wgmma (C7510).
#pragma unroll 1
    for (; left > 0; --left, ++step) {
      issue_dq(acc_dq, step - 2);
      const bool is_edge = scores.wait_for_q(state_of(step), dout_state_of(step));
      mma.issue_s(acc_s, state_of(step));
      scores.load_early_lse(r_lse, state_of(step));
      wgmma_wait<1>();
      scores.template wait_for_ds_copies<1>();
      scores.consumer_release(&s.ds_pipeline.empty[step & 1]);
      scores.store_dq(acc_dq, step & 1);
      scores.init_dp(acc_dp, dout_state_of(step), state_of(step).stage);
      mma.issue_dp(acc_dp, dout_state_of(step));
      scores.signal_dq_store(step & 1);
      issue_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, step, is_edge);
    }
    if (has_two) {
      issue_dq(acc_dq, step - 2);
      wgmma_wait<0>();
      scores.store_dq(acc_dq, step & 1);
      scores.signal_dq_store(step & 1);
    }
    issue_dq(acc_dq, step - 1);
    wgmma_wait<0>();
    scores.consumer_release(&s.k_pipeline.empty[0]);
    scores.store_dq(acc_dq, (step - 1) & 1);
    scores.signal_dq_store((step - 1) & 1);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Wait for S and dP, and convert them into P and dS. Issue dV += P^T dO and dK += dS^T Q, and
  // store dS. Then release Q and dO.
  __device__ __forceinline__ void issue_dv_dk(ScoreAcc& acc_s, ScoreAcc& acc_dp, RowStats& r_lse,
                                              DvAcc& acc_dv, DkAcc& acc_dk, int step,
                                              bool is_edge) {
    const State state = state_of(step);
    const DoutState dout_state = dout_state_of(step);
    ScoreOperand p16, ds16;
    wait_for_exponentials();
    scores.s_to_p(p16, acc_s, r_lse, state, dout_state, is_edge);
    mma.issue_dv(acc_dv, p16, dout_state);
    // NOTE: if the warpgroup arrived before the product, ptxas would move the arrival to before the
    // exponentials.
    release_exponentials();
    wgmma_wait<1>();
    warpgroup_fence_operand(acc_dp);
    if constexpr (Config::kDropout) {
      if (scores.drops()) scores.undo_dropout(acc_s, acc_dp, state);
    }
    scores.dp_to_ds(ds16, acc_s, acc_dp, is_edge);
    mbarrier_wait(&s.ds_pipeline.empty[state.stage], state.parity ^ 1);
    store_ds(ds16, state);
    mma.issue_dk(acc_dk, ds16, state);
    async_fence();
    scores.consumer_release(&s.ds_pipeline.full[state.stage]);
    if constexpr (Config::kBias) scores.copy_ds(mma.s_ds + state.stage * Config::kDsBytes, state);
    wgmma_wait<0>();
    scores.consumer_release(&s.q_pipeline.empty[state.stage]);
    scores.consumer_release(&s.dout_pipeline.empty[dout_state.stage]);
  }

  // Wait for dS of both warpgroups and issue the warpgroup's slice of dQ^T = K^T dS^T.
  __device__ __forceinline__ void issue_dq(DqAcc& acc_dq, int step) {
    const State state = state_of(step);
    s.ds_pipeline.wait(state);
    const int box = Config::kDim == 64 ? 0 : warpgroup,
              row_half = Config::kDim == 64 ? warpgroup : 0;
    const uint32_t s_rows = mma.s_ds + row_half * (Config::kDqRows * kSwizzleRowBytes);
    mma.issue_dq(acc_dq, mma.s_k, box, s_rows + state.stage * Config::kDsBytes);
  }

  // Process `left` query tiles, starting with query tile `step`.
  __device__ __forceinline__ void mainloop_unequal(DkAcc& acc_dk, DvAcc& acc_dv, int step,
                                                   int left) {
    ScoreAcc acc;          // S, then dQ, then dP
    ScoreOperand operand;  // P, then dS
    zero_unseen_keys();
    const int first = step;
    // NOTE: if S of the next query tile were in flight together with dK, ptxas would find too few
    // registers.
#pragma unroll 1
    for (; left > 0; --left, ++step) {
      const bool is_edge = scores.wait_for_q(state_of(step), dout_state_of(step));
      mma.issue_s(acc, state_of(step));
      wgmma_wait<0>();
      s_to_p_and_issue_dv(operand, acc, acc_dv, step, is_edge);
      if (step > first) compute_dq(acc, step - 1);
      scores.init_dp(acc, dout_state_of(step), state_of(step).stage);
      mma.issue_dp(acc, dout_state_of(step));
      dp_to_ds_and_store(operand, acc, step, is_edge);
      mma.issue_dk(acc_dk, operand, state_of(step));
      wgmma_wait<0>();
      scores.consumer_release(&s.q_pipeline.empty[state_of(step).stage]);
    }
    compute_dq(acc, step - 1);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Convert S into P. Wait for dO, then issue dV += P^T dO.
  __device__ __forceinline__ void s_to_p_and_issue_dv(ScoreOperand& p16, ScoreAcc& acc_s,
                                                      DvAcc& acc_dv, int step, bool is_edge) {
    const State state = state_of(step);
    wait_for_exponentials();
    RowStats r_lse;
    warpgroup_fence_operand(acc_s);
    scores.s_to_exponents(acc_s, r_lse, state, dout_state_of(step), is_edge);
    warpgroup_fence_operand(acc_s);
#pragma unroll
    for (int i = 0; i < Config::kRows / 4; ++i) {
      p16[i / 4][i % 4] =
          pack_pair<T>(exponential<T>(acc_s[2 * i]), exponential<T>(acc_s[2 * i + 1]));
    }
    s.dout_pipeline.wait(state);
    mma.issue_dv(acc_dv, p16, state);
    // NOTE: if the warpgroup arrived before the product, ptxas would move the arrival to before the
    // exponentials.
    release_exponentials();
  }

  // Wait for dP and dV, and release dO. Replace P in `operand` by dS, and store dS for dQ.
  __device__ __forceinline__ void dp_to_ds_and_store(ScoreOperand& operand, ScoreAcc& acc_dp,
                                                     int step, bool is_edge) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const State state = state_of(step);
    wgmma_wait<0>();
    warpgroup_fence_operand(acc_dp);
    scores.consumer_release(&s.dout_pipeline.empty[state.stage]);
    // A hidden score has P = 0, but its dP or delta may be NaN.
    // NOTE: hide() tells hidden scores by their position. With a comparison of P with 0, as in
    // dp_to_ds, ptxas keeps 16 more values in registers, and the kernel spills.
    if (is_edge) scores.hide(acc_dp, state, 0.f);
#pragma unroll
    for (int i = 0; i < Config::kRows / 4; ++i) {
      uint32_t& pair = operand[i / 4][i % 4];
      const float2 probability = unpack_pair<T>(pair);
      pair = pack_pair<T>(probability.x * (acc_dp[2 * i] * kUnshift),
                          probability.y * (acc_dp[2 * i + 1] * kUnshift));
    }
    const auto ds_state = ds_state_of(step);
    mbarrier_wait(&s.ds_pipeline.empty[0], ds_state.parity ^ 1);
    store_ds(operand, ds_state);
    async_fence();
    scores.consumer_release(&s.ds_pipeline.full[0]);
  }

  // Wait for dS of both warpgroups. Compute the warpgroup's slices of dQ^T = K^T dS^T, and store
  // them to shared memory for the dQ store warp. Release dS.
  __device__ __forceinline__ void compute_dq(ScoreAcc& acc_dq, int step) {
    s.ds_pipeline.wait(ds_state_of(step));
    mma.issue_dq(acc_dq, mma.s_k, warpgroup, mma.s_ds);
    wgmma_wait<0>();
    scores.store_dq(acc_dq, 0);
    if (step % 2 == warpgroup) {
      mma.issue_dq(acc_dq, mma.s_k, 2, mma.s_ds);
      wgmma_wait<0>();
      scores.store_dq_slice(s.dq[0][2], acc_dq);
    }
    scores.consumer_release(&s.ds_pipeline.empty[0]);
    scores.signal_dq_store(0);
  }
};
#endif

}  // namespace torchweld
