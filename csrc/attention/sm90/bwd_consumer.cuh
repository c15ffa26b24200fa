// A consumer warpgroup of attention's backward on Hopper for head dims up to 128: the mainloop and
// the order of the matmuls.
#pragma once

#include "attention/sm90/bwd_mma.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct BackwardSm90Consumer : BackwardSm90Mma<Config> {
  using Base = BackwardSm90Mma<Config>;
  using T = typename Config::T;
  using Base::consumer_release, Base::dp_to_ds, Base::gemm_dq, Base::leads, Base::mma_dk,
      Base::mma_dp, Base::load_stats, Base::mma_dv, Base::mma_s, Base::release_exponentials,
      Base::s_to_p, Base::state_of, Base::store_dq, Base::store_ds, Base::undo_dropout,
      Base::wait_for_exponentials, Base::work, Base::zero_unseen_keys;
  using Base::p, Base::s, Base::s_ds, Base::s_k, Base::s_v, Base::warpgroup, Base::work_state,
      Base::kDim;
  using typename Base::DkAcc, typename Base::DvAcc, typename Base::Params, typename Base::RowStats,
      typename Base::ScoreAcc, typename Base::ScoreOperand, typename Base::Shared,
      typename Base::State;
  using DqAcc = float[Config::kDqFloats];
  static constexpr int kKeyReleases = kBackwardConsumerWarps;

  __device__ __forceinline__ BackwardSm90Consumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {}

  // Process all work tiles of the CTA.
  __device__ __forceinline__ void run() {
    if (leads()) s.held_ds_buffers[warpgroup] = 0;
    if (warpgroup == 1) named_barrier_arrive(kExpWg0, kBackwardConsumerThreads);
    for (int tiles = 0;; ++tiles) {
      work_state = pipeline_state_of<kWorkStages>(tiles);
      s.work_pipeline.wait(work_state);
      if (work().is_end()) break;
      process_work_tile();
      consumer_release(&s.work_pipeline.empty[work_state.stage]);
    }
    if (leads()) tma_wait_read<0>();
    // Warpgroup 1 has arrived at kExpWg0 once more than warpgroup 0 has waited there, so warpgroup
    // 0 waits once more. Then the warpgroup waits until the dQ store warps have read the dQ buffers
    // of this warpgroup.
    if (warpgroup == 0) named_barrier_wait(kExpWg0, kBackwardConsumerThreads);
    for (int warp = 0; warp < Config::kDqStoreWarps; ++warp) {
      backward_sm90_close_dq_buffer(warp, warpgroup);
    }
  }

 private:
  __device__ __forceinline__ void process_work_tile() {
    DkAcc acc_dk;
    DvAcc acc_dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc_dk[i] = acc_dv[i] = 0.f;
    if (work().steps() > 0) {
      mainloop(acc_dk, acc_dv, work().first_step, work().steps());
    } else {
      // NOTE: consumers that released K or V before the producer acquired them would be a phase
      // ahead, and the producer would wait forever.
      const PipelineState<1> kv_state = backward_sm90_kv_state(work_state);
      s.k_pipeline.wait(kv_state);
      s.v_pipeline.wait(kv_state);
      release_ds_buffers(work().first_step);
      named_barrier_wait(kConsumerWg0 + warpgroup, 128);
      consumer_release(&s.k_pipeline.empty[0]);
    }
    // A warpgroup reads only its own 64 keys of V, so the warpgroup's dV may overwrite these keys
    // at once. Both warpgroups read all of dS, so dK may overwrite dS only after the barrier.
    float dv_scale = 1.f / (1 << kProbabilityShift<T>);
    if constexpr (Config::kDropout) dv_scale *= p.args.kept_factor;
    Base::template epilogue_dkv<true>(acc_dv, s_v, warpgroup * 64, 0, p.dvalue, dv_scale);
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    Base::template epilogue_dkv<false>(acc_dk, s_ds + warpgroup * Config::kDsBoxBytes, 0, 0, p.dkey,
                                       p.args.params.scale, Config::kDsBytes);
    if (leads()) {
      tma_wait_read<1>();  // dV has been read
      mbarrier_arrive(&s.v_pipeline.empty[0]);
      s.held_ds_buffers[warpgroup] = min(work().steps(), Config::kStages);
    }
  }

  // Releases the dS buffers of the previous work tile's last query tiles. Its dK overwrote them, so
  // this first waits until TMA has read dK. `step` is the next query tile.
  __device__ __forceinline__ void release_ds_buffers(int step) {
    if (leads()) {
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
    const PipelineState<1> kv_state = backward_sm90_kv_state(work_state);
    s.k_pipeline.wait(kv_state);
    zero_unseen_keys();
    release_ds_buffers(step);
    // From the third query tile on, the iteration for a tile also computes dQ of the tile two steps
    // before.
    const bool has_two = left > 1;
    left -= 2;
#pragma unroll 1
    for (const int first_end = step + (has_two ? 2 : 1); step < first_end; ++step) {
      const bool is_edge = mma_s(acc_s, step);
      load_early_lse(r_lse, step);
      s.v_pipeline.wait(kv_state);
      // NOTE: S may stay in flight, so this waits for nothing. Without it ptxas would insert a wait
      // for S before mma_dp writes the accumulators of dP (C7517).
      wgmma_wait<1>();
      mma_dp(acc_dp, step);
      mma_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, step, is_edge);
    }
    // NOTE: when an iteration starts, all wgmmas whose results the iteration reads are complete. If
    // such a wgmma were in flight, ptxas would insert a wait directly after the wgmma (C7510).
#pragma unroll 1
    for (; left > 0; --left, ++step) {
      mma_dq(acc_dq, step - 2);
      const bool is_edge = mma_s(acc_s, step);
      load_early_lse(r_lse, step);
      wgmma_wait<1>();
      consumer_release(&s.ds_pipeline.empty[step & 1]);
      store_dq_smem(acc_dq, step & 1);
      mma_dp(acc_dp, step);
      signal_dq_store(step & 1);
      mma_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, step, is_edge);
    }
    if (has_two) {
      mma_dq(acc_dq, step - 2);
      wgmma_wait<0>();
      store_dq_smem(acc_dq, step & 1);
      signal_dq_store(step & 1);
    }
    mma_dq(acc_dq, step - 1);
    wgmma_wait<0>();
    consumer_release(&s.k_pipeline.empty[0]);
    store_dq_smem(acc_dq, (step - 1) & 1);
    signal_dq_store((step - 1) & 1);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Load lse while S is computed, if there are registers for lse.
  __device__ __forceinline__ void load_early_lse(RowStats& r_lse, int step) const {
    if constexpr (Config::kEarlyLse) load_stats(r_lse, s.stats[state_of(step).stage].lse);
  }

  // Wait for S and dP, and convert them into P and dS. Issue dV += P^T dO and dK += dS^T Q, and
  // store dS. Then release Q and dO.
  __device__ __forceinline__ void mma_dv_dk(ScoreAcc& acc_s, ScoreAcc& acc_dp, RowStats& r_lse,
                                            DvAcc& acc_dv, DkAcc& acc_dk, int step, bool is_edge) {
    const State state = state_of(step);
    ScoreOperand p16, ds16;
    wait_for_exponentials();
    s_to_p(p16, acc_s, r_lse, state, is_edge);
    mma_dv(acc_dv, p16, state);
    // NOTE: if the warpgroup arrived before the product, ptxas would move the arrival to before the
    // exponentials.
    release_exponentials();
    wgmma_wait<1>();
    warpgroup_fence_operand(acc_dp);
    if constexpr (Config::kDropout) undo_dropout(acc_s, acc_dp, state);
    dp_to_ds(ds16, acc_s, acc_dp, is_edge);
    mbarrier_wait(&s.ds_pipeline.empty[state.stage], state.parity ^ 1);
    store_ds(ds16, state);
    mma_dk(acc_dk, ds16, state);
    async_fence();
    consumer_release(&s.ds_pipeline.full[state.stage]);
    wgmma_wait<0>();
    consumer_release(&s.q_pipeline.empty[state.stage]);
    consumer_release(&s.dout_pipeline.empty[state.stage]);
  }

  // Wait for dS of both warpgroups and issue the warpgroup's slice of dQ^T = K^T dS^T.
  __device__ __forceinline__ void mma_dq(DqAcc& acc_dq, int step) {
    const State state = state_of(step);
    s.ds_pipeline.wait(state);
    const int box = kDim == 64 ? 0 : warpgroup, row_half = kDim == 64 ? warpgroup : 0;
    const uint32_t s_rows = s_ds + row_half * (Config::kDqRows * kSwizzleRowBytes);
    gemm_dq(acc_dq, box, s_rows + state.stage * Config::kDsBytes);
  }

  // Store dQ to the shared memory of a dQ store warp. The two store warps receive the dQ of
  // alternate query tiles.
  // NOTE: async_fence takes long directly after these stores, so signal_dq_store is called after
  // the next wgmmas are issued.
  __device__ __forceinline__ void store_dq_smem(DqAcc& acc_dq, int store_warp) {
    static_assert(Config::kDqStoreWarps == Config::kStages);
    named_barrier_wait(kDqEmptyWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
    store_dq(s.dq[store_warp][warpgroup], acc_dq);
  }
  __device__ __forceinline__ void signal_dq_store(int store_warp) {
    async_fence();
    named_barrier_arrive(kDqFullWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
  }
};
#endif

}  // namespace torchweld
