// A consumer warpgroup of attention's backward on Hopper for head dims up to 128. The warpgroup has
// 64 keys of the CTA. The scores are transposed: the M dimension of wgmma is the keys. Therefore
// P^T and dS^T can be register operands of dV += P^T dO and dK += dS^T Q.
#pragma once

#include "attention/sm90/bwd_scores.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct BackwardSm90Consumer : BackwardSm90Scores<Config> {
  using Base = BackwardSm90Scores<Config>;
  using T = typename Config::T;
  using Base::consumer_release, Base::dp_to_ds, Base::end_live, Base::first_live, Base::init_dp,
      Base::is_edge, Base::lane, Base::load_stats, Base::make_tile_iterator, Base::s_to_p,
      Base::warp, Base::zero_unseen_rows;
  using Base::p, Base::s, Base::warpgroup, Base::kRows, Base::kRowSlices;
  using typename Base::Params, typename Base::RowStats, typename Base::ScoreAcc,
      typename Base::ScoreOperand, typename Base::Shared, typename Base::State,
      typename Base::TileIterator;
  static constexpr int kDim = Config::kDim;
  using DkvAcc = float[kDim / 2];
  using DqAcc = float[Config::kDqFloats];

  uint32_t s_k, s_v, s_q, s_dout, s_ds;
  uint32_t s_ds_lane;  // the address of this lane's stmatrix row

  __device__ __forceinline__ BackwardSm90Consumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {
    s_k = shared_address(s.k);
    s_v = shared_address(s.v);
    s_q = shared_address(s.q[0]);
    s_dout = shared_address(s.dout[0]);
    s_ds = shared_address(s.ds[0]);
    // stmatrix transposes the fragments of dS^T. Matrices 0 and 1 have rows 0 to 7, and matrices 2
    // and 3 have rows 8 to 15. Matrices 0 and 2 have the first 8 of 16 keys, and matrices 1 and 3
    // have the last 8.
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    s_ds_lane = s_ds + warpgroup * Config::kDsHalfBytes + row * kSwizzleRowBytes +
                (swizzled_chunk(row, chunk) << 4);
    // Keep the address in one register. NOTE: the kernel for a general mask has no free register
    // for the address.
    if constexpr (!Config::kMasked) asm volatile("" : "+r"(s_ds_lane));
  }

  __device__ __forceinline__ void run() {
    DkvAcc acc_dk, acc_dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc_dk[i] = acc_dv[i] = 0.f;
    const int steps = s.work.steps();
    if (steps > 0) mainloop(acc_dk, acc_dv, steps);
    // A warpgroup reads only its own keys of V, so its dV may overwrite them at once. Both
    // warpgroups read all keys of K, so dK may overwrite K only after the barrier.
    Base::template epilogue_dkv<true>(acc_dv, s_v, warpgroup * 64, 0, p.dvalue,
                                      1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    Base::template epilogue_dkv<false>(acc_dk, s_k, warpgroup * 64, 0, p.dkey, p.args.params.scale);
    tma_wait_read<0>();
  }

 private:
  __device__ __forceinline__ void mainloop(DkvAcc& acc_dk, DkvAcc& acc_dv, int steps) {
    State state;
    ScoreAcc acc_s, acc_dp;
    DqAcc acc_dq;
    RowStats r_lse;
    TileIterator tiles = make_tile_iterator();
    mbarrier_wait(&s.k_full, 0);
    zero_unseen_keys();
    bool edge = mma_s(acc_s, r_lse, state, tiles);
    mbarrier_wait(&s.v_full, 0);
    mma_dp(acc_dp, state);
    mma_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, state, tiles, edge);
    // NOTE: at the start of an iteration, no wgmma is in flight whose result the iteration reads.
    // Otherwise ptxas would insert a wait directly after that wgmma (C7510). The loop needs fewer
    // registers if fewer wgmmas are in flight at the start of an iteration.
#pragma unroll 1
    for (; steps > 1; --steps) {
      mma_dq(acc_dq, state);
      state.advance();
      tiles.advance();
      edge = mma_s(acc_s, r_lse, state, tiles);
      wgmma_wait<1>();
      store_dq_smem(acc_dq, state.stage ^ 1);
      mma_dp(acc_dp, state);
      signal_dq_store(state.stage ^ 1);
      mma_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, state, tiles, edge);
    }
    mma_dq(acc_dq, state);
    wgmma_wait<0>();
    store_dq_smem(acc_dq, state.stage);
    signal_dq_store(state.stage);
    warpgroup_fence_operand(acc_dk);
    warpgroup_fence_operand(acc_dv);
  }

  // Wait for Q, then issue S^T = K Q^T. Return whether the mask hides some of the scores.
  __device__ __forceinline__ bool mma_s(ScoreAcc& acc_s, RowStats& r_lse, const State& state,
                                        const TileIterator& tiles) {
    s.q_pipeline.wait(state);
    zero_unseen_rows(state, state, tiles);
    discard_accumulators(acc_s);
    gemm_ss<0>(acc_s, s_k, s_q + state.stage * Config::kQueryBytes);
    if constexpr (Config::kEarlyLse) load_stats(r_lse, s.lse[state.stage]);
    return is_edge(state, tiles);
  }

  // Wait for dO, then issue dP^T - delta = V dO^T - delta.
  __device__ __forceinline__ void mma_dp(ScoreAcc& acc_dp, const State& state) {
    s.dout_pipeline.wait(state);
    init_dp(acc_dp, s.delta[state.stage]);
    gemm_ss<1>(acc_dp, s_v, s_dout + state.stage * Config::kQueryBytes);
  }

  // Wait for S and dP, and convert them into P and dS. Issue dV += P^T dO and dK += dS^T Q.
  __device__ __forceinline__ void mma_dv_dk(ScoreAcc& acc_s, ScoreAcc& acc_dp, RowStats& r_lse,
                                            DkvAcc& acc_dv, DkvAcc& acc_dk, const State& state,
                                            const TileIterator& tiles, bool edge) {
    ScoreOperand p16, ds16;
    s_to_p(p16, acc_s, r_lse, state, tiles.tile, edge);
    mma_dv(acc_dv, p16, state);
    wgmma_wait<1>();
    warpgroup_fence_operand(acc_dp);
    dp_to_ds(ds16, acc_s, acc_dp, edge);
    mma_dk(acc_dk, ds16, state);
    store_ds(ds16, state);
    wgmma_wait<Config::kDkInFlight ? 1 : 0>();
  }

  // Issue dV += P^T dO.
  __device__ __forceinline__ void mma_dv(DkvAcc& acc_dv, const ScoreOperand& p16,
                                         const State& state) const {
    gemm_rs(acc_dv, p16, s_dout + state.stage * Config::kQueryBytes);
  }

  // Issue dK += dS^T Q.
  __device__ __forceinline__ void mma_dk(DkvAcc& acc_dk, const ScoreOperand& ds16,
                                         const State& state) const {
    gemm_rs(acc_dk, ds16, s_q + state.stage * Config::kQueryBytes);
  }

  // Store dS to shared memory, for the dQ product.
  // NOTE: dS has two buffers. Consecutive tiles alternate between them. A warpgroup overwrites a
  // buffer only after it has passed the barrier of the other buffer. Both warpgroups reach that
  // barrier only after their dQ products have read the first buffer.
  __device__ __forceinline__ void store_ds(const ScoreOperand& ds16, const State& state) const {
    const uint32_t stage_bytes = state.stage * Config::kDsBytes;
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      store_matrix_4_transposed(s_ds_lane + stage_bytes + slice * 16 * kSwizzleRowBytes,
                                ds16[slice]);
    }
    async_fence();
  }

  // Wait for dS of both warpgroups and issue the warpgroup's slice of dQ^T = K^T dS^T. Wait for dV
  // and dK, then release Q and dO.
  __device__ __forceinline__ void mma_dq(DqAcc& acc_dq, const State& state) {
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    gemm_dq(acc_dq, s_ds + state.stage * Config::kDsBytes);
    wgmma_wait<1>();
    consumer_release(&s.q_pipeline.empty[state.stage]);
    consumer_release(&s.dout_pipeline.empty[state.stage]);
  }

  // Store dQ to the shared memory of a dQ store warp. The store warps alternate like the stages.
  // NOTE: async_fence takes long directly after these stores, so signal_dq_store is called after
  // the next wgmmas are issued.
  __device__ __forceinline__ void store_dq_smem(DqAcc& acc_dq, int store_warp) {
    static_assert(Config::kDqStoreWarps == Config::kStages);
    warpgroup_fence_operand(acc_dq);
    named_barrier_wait(kDqEmptyWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
    float4* s_dq = reinterpret_cast<float4*>(s.dq[store_warp][warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Config::kDqFloats; i += 4) {
      s_dq[i / 4 * 128] = make_float4(acc_dq[i], acc_dq[i + 1], acc_dq[i + 2], acc_dq[i + 3]);
    }
  }
  __device__ __forceinline__ void signal_dq_store(int store_warp) {
    async_fence();
    named_barrier_arrive(kDqFullWg0 + 2 * store_warp + warpgroup, kBackwardDqThreads);
  }

  // Issue acc = (kScaleD ? acc : 0) + A B^T. A is the warpgroup's 64 keys in s_keys. B is kRows
  // query rows in s_rows.
  template <int kScaleD>
  __device__ __forceinline__ void gemm_ss(ScoreAcc& acc, uint32_t s_keys, uint32_t s_rows) const {
    const TileDescriptor a(s_keys + warpgroup * 64 * kSwizzleRowBytes, 16), b(s_rows, 16);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kDim / 16; ++slice) {
      const int box = slice / 4, in_row = slice % 4 * 32;
      Wgmma<T, kRows>::template multiply<0, 0>(acc, a.offset(box * Config::kKeyBoxBytes + in_row),
                                               b.offset(box * Config::kQueryBoxBytes + in_row),
                                               kScaleD || slice > 0);
    }
    wgmma_commit();
  }

  // Issue acc += A B. A is P^T or dS^T in registers. B is kRows query rows in s_rows.
  __device__ __forceinline__ void gemm_rs(DkvAcc& acc, const ScoreOperand& a,
                                          uint32_t s_rows) const {
    const TileDescriptor b(s_rows, Config::kQueryBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      Wgmma<T, kDim>::template multiply<1>(acc, a[slice], b.offset(slice * 16 * kSwizzleRowBytes),
                                           1);
    }
    wgmma_commit();
  }

  // Issue acc = the warpgroup's slice of K^T dS^T, over 128 keys.
  __device__ __forceinline__ void gemm_dq(DqAcc& acc, uint32_t s_ds) const {
    const int box = kDim == 64 ? 0 : warpgroup, row_half = kDim == 64 ? warpgroup : 0;
    const TileDescriptor a(s_k + box * Config::kKeyBoxBytes, Config::kKeyBoxBytes),
        b(s_ds + row_half * (Config::kDqRows * kSwizzleRowBytes), 16);
    discard_accumulators(acc);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kKeys / 16; ++slice) {
      Wgmma<T, Config::kDqRows>::template multiply<1, 0>(
          acc, a.offset(slice * 16 * kSwizzleRowBytes),
          b.offset(slice / 4 * Config::kDsHalfBytes + slice % 4 * 32), slice > 0);
    }
    wgmma_commit();
  }

  // Zero the keys of K that no query row sees. dS of these keys is 0, but K may be NaN, and 0 * NaN
  // would make dQ NaN. TMA has already filled rows behind the last key with zeros.
  __device__ __forceinline__ void zero_unseen_keys() const {
    const int begin = first_live() - s.work.first_key, end = end_live() - s.work.first_key;
    if (begin <= 0 && (!Config::kMasked || end >= Config::kKeys)) return;
    Base::template zero_rows<Config::kBoxes, Config::kKeyBoxBytes>(
        s.k, Config::kKeys, [&](int key) { return key < begin || key >= end; });
    async_fence();
    named_barrier_wait<kUnseenZeroed, kBackwardConsumerThreads>();
  }
};
#endif

}  // namespace torchweld
