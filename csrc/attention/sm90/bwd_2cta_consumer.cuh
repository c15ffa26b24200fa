// A consumer warpgroup of the 2-CTA kernel of attention's backward on Hopper, for larger
// head dims up to 256.
//
// A cluster of two CTAs processes 128 keys of a KV head, 64 in each CTA. Both CTAs loop over the
// same query tiles and multicast Q and dO to each other.
// S and dP: each of the two warpgroups of a CTA computes half of the rows, for the CTA's 64 keys.
// dK and dV: each warpgroup computes half of the columns. For its own rows, P^T and dS^T are
// register operands of wgmma. For the other warpgroup's rows, wgmma reads P^T and dS^T from shared
// memory.
// dQ: each CTA computes half of the columns, over the keys of both CTAs. For this, the CTA loads
// these columns of the peer's K and receives the peer's dS. The exchange halves the number of
// additions to dQ in global memory.
//
// A kernel with one CTA per 64 keys took 1.25 to 1.6 times as long. Shared memory is the
// bottleneck: for 64 rows, 64 keys and 256 columns, shared memory is busy for 4000 clocks, and the
// tensor cores for 2560 clocks. A thread uses 128 registers for dK and dV, 32 for S and dP, and 32
// for dQ. The exchange between two CTAs is new.
#pragma once

#include "attention/sm90/bwd_mma.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct Backward2CtaConsumer {
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Shared = typename Config::Shared;
  using Scores = BackwardSm90Scores<Config>;
  using Mma = BackwardSm90Mma<Config>;
  using State = typename Scores::State;
  using DoutState = typename Scores::DoutState;
  using ScoreAcc = typename Scores::ScoreAcc;
  using ScoreOperand = typename Scores::ScoreOperand;
  using RowStats = typename Scores::RowStats;
  using DkvAcc = typename Mma::DkAcc;
  using DqAcc = typename Mma::DqAcc;
  static constexpr int kDkvBoxes = Config::kBoxes / 2;

  const Params& p;
  Shared& s;
  const int warpgroup;
  Scores scores{p, s, warpgroup};
  Mma mma{s, warpgroup};
  const uint32_t s_p = shared_address(s.p_or_peer_ds);
  // The offset of this lane's stmatrix row in a tile of P or dS.
  const uint32_t lane_offset =
      transposed_lane_offset(scores.lane(), scores.first_row(), scores.warp());

  __device__ __forceinline__ void run() {
    DkvAcc acc_dk = {}, acc_dv = {};
    const int steps = s.work[0].steps();
    if (steps > 0) mainloop(acc_dk, acc_dv, steps);
    // Both warpgroups have passed kDsWritten after their last reads of V, so dV may overwrite V.
    // The other warpgroup's wgmmas may still read K, so dK waits for another barrier.
    const int box = warpgroup * kDkvBoxes;
    scores.template epilogue_dkv<true>(acc_dv, mma.s_v + box * Config::kKeyBoxBytes, 0, box,
                                       p.dvalue, 1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    scores.template epilogue_dkv<false>(acc_dk, mma.s_k + box * Config::kKeyBoxBytes, 0, box,
                                        p.dkey, p.args.params.scale);
    tma_wait_read<0>();
    backward_sm90_close_dq_buffer(0, warpgroup);
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ uint32_t peer() { return Config::cta_rank() ^ 1; }

  __device__ __forceinline__ void mainloop(DkvAcc& acc_dk, DkvAcc& acc_dv, int steps) {
    State q_state;
    DoutState dout_state;
    ScoreAcc acc_s, acc_dp;
    DqAcc acc_dq;
    RowStats r_lse;
    mbarrier_wait(&s.k_full, 0);
    zero_unseen_keys();
    bool is_edge = scores.wait_for_q(q_state, dout_state);
    mma.issue_s(acc_s, q_state);
    scores.load_early_lse(r_lse, q_state);
    mbarrier_wait(&s.v_full, 0);
    // NOTE: S may stay in flight, so this waits for nothing. Without it ptxas would insert a wait
    // for S before issue_dp writes the accumulators of dP (C7517).
    wgmma_wait<1>();
    scores.init_dp(acc_dp, dout_state, dout_state.stage);
    mma.issue_dp(acc_dp, dout_state);
    issue_dv_dk<true>(acc_s, acc_dp, r_lse, acc_dv, acc_dk, q_state, dout_state, is_edge);
    // NOTE: when an iteration starts, all wgmmas whose results the iteration reads are complete. If
    // such a wgmma were in flight, ptxas would insert a wait directly after the wgmma (C7510).
#pragma unroll 1
    for (; steps > 1; --steps) {
      issue_dk_dq(acc_dq, acc_dk, q_state, dout_state);
      q_state.advance();
      dout_state.advance();
      is_edge = scores.wait_for_q(q_state, dout_state);
      mma.issue_s(acc_s, q_state);
      scores.load_early_lse(r_lse, q_state);
      wgmma_wait<1>();
      named_barrier_arrive(kDsConsumedWg0 + warpgroup, kBackwardConsumerThreads);
      scores.store_dq(acc_dq, 0);
      scores.init_dp(acc_dp, dout_state, dout_state.stage);
      mma.issue_dp(acc_dp, dout_state);
      scores.signal_dq_store(0);
      issue_dv_dk<false>(acc_s, acc_dp, r_lse, acc_dv, acc_dk, q_state, dout_state, is_edge);
    }
    issue_dk_dq(acc_dq, acc_dk, q_state, dout_state);
    wgmma_wait<0>();
    scores.store_dq(acc_dq, 0);
    scores.signal_dq_store(0);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Wait for S and dP, and convert them into P and dS. Issue dV += P^T dO over all rows, and dK +=
  // dS^T Q over the warpgroup's own rows. Wait for dV and release dO. Then let the sender warp send
  // dS to the peer.
  template <bool kFirstTile>
  __device__ __forceinline__ void issue_dv_dk(ScoreAcc& acc_s, ScoreAcc& acc_dp, RowStats& r_lse,
                                              DkvAcc& acc_dv, DkvAcc& acc_dk, const State& q_state,
                                              const DoutState& dout_state, bool is_edge) {
    ScoreOperand p16, ds16;
    scores.s_to_p(p16, acc_s, r_lse, q_state, dout_state, is_edge);
    issue_dv<kFirstTile>(acc_dv, p16, dout_state);
    wgmma_wait<2>();
    warpgroup_fence_operand(acc_dp);
    scores.dp_to_ds(ds16, acc_s, acc_dp, is_edge);
    mma.issue_dk(acc_dk, ds16, q_state);
    store_ds(ds16, dout_state);
    wgmma_wait<1>();
    scores.consumer_release(&s.dout_pipeline.empty[0]);
    signal_ds_send();
  }

  // Issue dV += P^T dO over the warpgroup's own rows, exchange P with the other warpgroup, then
  // issue dV += P^T dO over the other warpgroup's rows.
  template <bool kFirstTile>
  __device__ __forceinline__ void issue_dv(DkvAcc& acc_dv, const ScoreOperand& p16,
                                           const DoutState& dout_state) const {
    mma.issue_dv(acc_dv, p16, dout_state);
    // The buffer of P still holds the peer's dS of the previous tile. Wait until the other
    // warpgroup's dQ product has read that dS.
    if constexpr (!kFirstTile) {
      named_barrier_wait(kDsConsumedWg0 + (warpgroup ^ 1), kBackwardConsumerThreads);
    }
    store_scores(s_p, p16);
    named_barrier_wait<kPWritten, kBackwardConsumerThreads>();
    mma.issue_other_rows(acc_dv, s_p, mma.s_dout);
  }

  // Store dS to shared memory, after the dS of the previous tile has arrived at the peer.
  // NOTE: no wgmma still reads the buffer, because both warpgroups have passed a barrier after the
  // products that read the previous tile's dS.
  __device__ __forceinline__ void store_ds(const ScoreOperand& ds16, const DoutState& dout_state) {
    mbarrier_wait(&s.ds_sent, dout_state.parity ^ 1);
    store_scores(mma.s_ds, ds16);
  }

  // Expect the peer's dS, which overwrites P. Signal to the peer that this warpgroup no longer
  // reads P. Let the sender warp send this CTA's dS.
  __device__ __forceinline__ void signal_ds_send() {
    if (threadIdx.x == 128) mbarrier_arrive_expect_tx(&s.ds_full, Config::kDsBytes);
    __syncwarp();
    if (scores.lane() == 0) mbarrier_arrive_at(&s.ds_wanted, peer());
    named_barrier_arrive(kDsReady, kBackwardSendThreads);
  }

  // Issue dK += dS^T Q over the other warpgroup's rows. Issue this warpgroup's slice of dQ^T = K^T
  // dS^T over the keys of both CTAs. Wait for dK and release Q.
  __device__ __forceinline__ void issue_dk_dq(DqAcc& acc_dq, DkvAcc& acc_dk, const State& q_state,
                                              const DoutState& dout_state) {
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    mma.issue_other_rows(acc_dk, mma.s_ds, mma.s_q + q_state.stage * Config::kQueryBytes);
    const int box = Config::cta_rank() * 2 + warpgroup;
    mma.issue_dq(acc_dq, mma.s_k, box, mma.s_ds);
    wgmma_wait<1>();
    scores.consumer_release(&s.q_pipeline.empty[q_state.stage]);
    // Wait for the peer's dS. Signal to the peer that this dS has arrived.
    mbarrier_wait(&s.ds_full, dout_state.parity);
    if (threadIdx.x == 128) mbarrier_arrive_at(&s.ds_sent, peer());
    __syncwarp();
    mma.template issue_dq<1>(acc_dq, shared_address(s.k_peer), warpgroup, s_p);
  }

  // Store P^T or dS^T of the warpgroup's rows to a tile in shared memory.
  __device__ __forceinline__ void store_scores(uint32_t s_tile, const ScoreOperand& r) const {
#pragma unroll
    for (int slice = 0; slice < Scores::kRowSlices; ++slice) {
      store_matrix_4_transposed(s_tile + lane_offset + slice * 16 * kSwizzleRowBytes, r[slice]);
    }
    async_fence();
  }

  // Zero the keys of K that no query row sees. dS of these keys is 0, but K may be NaN, and 0 * NaN
  // would make dQ NaN. TMA has already filled rows behind the last key with zeros.
  __device__ __forceinline__ void zero_unseen_keys() const {
    const int first = scores.work().first_key;
    if (scores.first_live() <= first &&
        (!Config::kMasked || scores.end_live() >= first + Config::kKeys))
      return;
    const auto zero = [&](auto boxes, char* s_tile, int cta) {
      const int begin = scores.first_live() - (first + cta * Config::kCtaKeys),
                end = scores.end_live() - (first + cta * Config::kCtaKeys);
      scores.template zero_rows<boxes.value, Config::kKeyBoxBytes>(
          s_tile, Config::kCtaKeys, [&](int key) { return key < begin || key >= end; });
    };
    zero(std::integral_constant<int, Config::kBoxes>(), s.k, Config::cta_rank());
    zero(std::integral_constant<int, Config::kBoxes / 2>(), s.k_peer, static_cast<int>(peer()));
    async_fence();
    named_barrier_wait<kUnseenZeroed, kBackwardConsumerThreads>();
  }
};
#endif

}  // namespace torchweld
