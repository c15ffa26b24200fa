// A consumer warpgroup of attention's backward on Hopper for head dims up to 192 of Q and K, and up
// to 128 of V: the mainloop and the order of the matmuls.
//
// dK and dV need 160 registers per thread. Therefore S, dQ and dP use the same 32 registers one
// after the other, and P and dS use the same 16 registers. Only the 16-bit P is left when dS is
// computed. dQ of a query tile is computed one step late, so that a warpgroup rarely waits for the
// other warpgroup's dS. A step is:
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
struct BackwardSm90UnequalConsumer : BackwardSm90Mma<Config> {
  using Base = BackwardSm90Mma<Config>;
  using T = typename Config::T;
  using Base::consumer_release, Base::ds_state_of, Base::gemm_dq, Base::hide, Base::leads,
      Base::mma_dk, Base::mma_dp, Base::mma_dv, Base::mma_s, Base::release_exponentials,
      Base::s_to_exponents, Base::state_of, Base::store_dq, Base::store_ds,
      Base::wait_for_exponentials, Base::work, Base::zero_unseen_keys;
  using Base::p, Base::s, Base::s_ds, Base::s_k, Base::s_v, Base::warpgroup, Base::work_state,
      Base::kRows;
  using typename Base::DkAcc, typename Base::DvAcc, typename Base::Params, typename Base::RowStats,
      typename Base::ScoreAcc, typename Base::ScoreOperand, typename Base::Shared,
      typename Base::State;
  static constexpr int kKeyReleases = 2;  // one thread of each warpgroup releases K
  static_assert(Config::kDqSlices == 3 && Config::kDqRows == kRows && Config::kDsStages == 1);
  static_assert(!Config::kEarlyLse);

  __device__ __forceinline__ BackwardSm90UnequalConsumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {}

  // Process all work tiles of the CTA.
  __device__ __forceinline__ void run() {
    if (warpgroup == 1) named_barrier_arrive(kExpWg0, kBackwardConsumerThreads);
    for (int tiles = 0;; ++tiles) {
      work_state = pipeline_state_of<kWorkStages>(tiles);
      s.work_pipeline.wait(work_state);
      if (work().is_end()) break;
      process_work_tile();
      consumer_release(&s.work_pipeline.empty[work_state.stage]);
    }
    // Warpgroup 1 has arrived at kExpWg0 once more than warpgroup 0 has waited there, so warpgroup
    // 0 waits once more. Then the warpgroup waits until the dQ store warp has read the dQ buffer of
    // this warpgroup.
    if (warpgroup == 0) named_barrier_wait(kExpWg0, kBackwardConsumerThreads);
    backward_sm90_close_dq_buffer(0, warpgroup);
  }

 private:
  __device__ __forceinline__ void process_work_tile() {
    DkAcc acc_dk;
    DvAcc acc_dv;
#pragma unroll
    for (float& x : acc_dk) x = 0.f;
#pragma unroll
    for (float& x : acc_dv) x = 0.f;
    const PipelineState<1> kv_state = backward_sm90_kv_state(work_state);
    s.k_pipeline.wait(kv_state);
    s.v_pipeline.wait(kv_state);
    if (work().steps() > 0) mainloop(acc_dk, acc_dv, work().first_step, work().steps());
    // A warpgroup reads only its own 64 keys of V, so the warpgroup's dV may overwrite these keys
    // at once. Both warpgroups read all of K, so dK may overwrite K only after the barrier.
    Base::template epilogue_dkv<true>(acc_dv, s_v, warpgroup * 64, 0, p.dvalue,
                                      1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    Base::template epilogue_dkv<false>(acc_dk, s_k, warpgroup * 64, 0, p.dkey, p.args.params.scale);
    if (leads()) {
      tma_wait_read<0>();  // dV and dK have been read
      mbarrier_arrive(&s.v_pipeline.empty[0]);
      mbarrier_arrive(&s.k_pipeline.empty[0]);
    }
  }

  // Process `left` query tiles, starting with query tile `step`.
  __device__ __forceinline__ void mainloop(DkAcc& acc_dk, DvAcc& acc_dv, int step, int left) {
    ScoreAcc acc;          // S, then dQ, then dP
    ScoreOperand operand;  // P, then dS
    zero_unseen_keys();
    const int first = step;
    // NOTE: if S of the next query tile were in flight together with dK, ptxas would find too few
    // registers.
#pragma unroll 1
    for (; left > 0; --left, ++step) {
      const bool is_edge = mma_s(acc, step);
      wgmma_wait<0>();
      s_to_p_and_mma_dv(operand, acc, acc_dv, step, is_edge);
      if (step > first) compute_dq(acc, step - 1);
      mma_dp(acc, step);
      dp_to_ds_and_store(operand, acc, step, is_edge);
      mma_dk(acc_dk, operand, state_of(step));
      wgmma_wait<0>();
      consumer_release(&s.q_pipeline.empty[state_of(step).stage]);
    }
    compute_dq(acc, step - 1);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Convert S into P. Wait for dO, then issue dV += P^T dO.
  __device__ __forceinline__ void s_to_p_and_mma_dv(ScoreOperand& p16, ScoreAcc& acc_s,
                                                    DvAcc& acc_dv, int step, bool is_edge) {
    const State state = state_of(step);
    wait_for_exponentials();
    RowStats r_lse;
    warpgroup_fence_operand(acc_s);
    s_to_exponents(acc_s, r_lse, state, is_edge);
    warpgroup_fence_operand(acc_s);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      p16[i / 4][i % 4] =
          pack_pair<T>(exponential<T>(acc_s[2 * i]), exponential<T>(acc_s[2 * i + 1]));
    }
    s.dout_pipeline.wait(state);
    mma_dv(acc_dv, p16, state);
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
    consumer_release(&s.dout_pipeline.empty[state.stage]);
    // A hidden score has P = 0, but its dP or delta may be NaN.
    // NOTE: hide() tells hidden scores by their position. With a comparison of P with 0, as in
    // dp_to_ds, ptxas keeps 16 more values in registers, and the kernel spills.
    if (is_edge) hide(acc_dp, state, 0.f);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      uint32_t& pair = operand[i / 4][i % 4];
      const float2 probability = unpack_pair<T>(pair);
      pair = pack_pair<T>(probability.x * (acc_dp[2 * i] * kUnshift),
                          probability.y * (acc_dp[2 * i + 1] * kUnshift));
    }
    const auto ds_state = ds_state_of(step);
    mbarrier_wait(&s.ds_pipeline.empty[0], ds_state.parity ^ 1);
    store_ds(operand, ds_state);
    async_fence();
    consumer_release(&s.ds_pipeline.full[0]);
  }

  // Wait for dS of both warpgroups. Compute the warpgroup's slices of dQ^T = K^T dS^T, and store
  // them to shared memory for the dQ store warp. Release dS.
  __device__ __forceinline__ void compute_dq(ScoreAcc& acc_dq, int step) {
    s.ds_pipeline.wait(ds_state_of(step));
    gemm_dq(acc_dq, warpgroup, s_ds);
    wgmma_wait<0>();
    named_barrier_wait(kDqEmptyWg0 + warpgroup, kBackwardDqThreads);
    store_dq(s.dq[0][warpgroup], acc_dq);
    if (step % 2 == warpgroup) {
      gemm_dq(acc_dq, 2, s_ds);
      wgmma_wait<0>();
      store_dq(s.dq[0][2], acc_dq);
    }
    consumer_release(&s.ds_pipeline.empty[0]);
    async_fence();
    named_barrier_arrive(kDqFullWg0 + warpgroup, kBackwardDqThreads);
  }
};
#endif

}  // namespace torchweld
