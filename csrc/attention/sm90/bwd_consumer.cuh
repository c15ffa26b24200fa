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
      Base::lane, Base::load_stats, Base::query_tile, Base::s_to_p, Base::warp, Base::work,
      Base::zero_unseen_rows;
  using Base::p, Base::s, Base::warpgroup, Base::work_state, Base::kRows, Base::kRowSlices;
  using typename Base::Params, typename Base::RowStats, typename Base::ScoreAcc,
      typename Base::ScoreOperand, typename Base::Shared, typename Base::State;
  static constexpr int kDim = Config::kDim;
  using DkvAcc = float[kDim / 2];
  using DqAcc = float[Config::kDqFloats];

  uint32_t s_k, s_v, s_q, s_dout, s_ds;
  uint32_t s_ds_lane;  // the address of this lane's stmatrix row; not used under a general mask

  __device__ __forceinline__ BackwardSm90Consumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {
    s_k = shared_address(s.k);
    s_v = shared_address(s.v);
    s_q = shared_address(s.q[0]);
    s_dout = shared_address(s.dout[0]);
    s_ds = shared_address(s.ds[0]);
    if constexpr (!Config::kMasked) {
      s_ds_lane = ds_lane_address(threadIdx.x);
      asm volatile("" : "+r"(s_ds_lane));  // keep the address in one register
    }
  }

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
    // Complete the barriers that have arrivals left, and let the dQ store warps finish with the dQ
    // buffers of this warpgroup.
    if (warpgroup == 0) named_barrier_wait(kExpWg0, kBackwardConsumerThreads);
    for (int warp = 0; warp < Config::kDqStoreWarps; ++warp) {
      backward_sm90_close_dq_buffer(warp, warpgroup);
    }
  }

 private:
  // Whether this thread issues the warpgroup's TMA stores.
  static __device__ __forceinline__ bool leads() { return threadIdx.x % 128 == 0; }

  // Returns the position of query tile `step`, counted over all work tiles.
  static __device__ __forceinline__ State state_of(int step) {
    return pipeline_state_of<Config::kStages>(step);
  }

  __device__ __forceinline__ void process_work_tile() {
    DkvAcc acc_dk, acc_dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc_dk[i] = acc_dv[i] = 0.f;
    if (work().steps() > 0) {
      mainloop(acc_dk, acc_dv, work().first_step, work().steps());
    } else {
      release_ds_buffers(work().first_step);
      named_barrier_wait(kConsumerWg0 + warpgroup, 128);
      consumer_release(&s.k_pipeline.empty[0]);
    }
    // A warpgroup reads only its own keys of V, so its dV may overwrite them at once. Both
    // warpgroups read all of dS, so dK may overwrite dS only after the barrier.
    Base::template epilogue_dkv<true>(acc_dv, s_v, warpgroup * 64, 0, p.dvalue,
                                      1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kDsWritten, kBackwardConsumerThreads>();
    Base::template epilogue_dkv<false>(acc_dk, s_ds + warpgroup * Config::kDsHalfBytes, 0, 0,
                                       p.dkey, p.args.params.scale, Config::kDsBytes);
    if (leads()) {
      tma_wait_read<1>();  // dV has been read
      mbarrier_arrive(&s.v_pipeline.empty[0]);
      s.held_ds_buffers[warpgroup] = min(work().steps(), Config::kStages);
    }
  }

  // Release the dS buffers that the previous work tile used for dS of its last query tiles and then
  // for dK. `step` is the next query tile.
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
  __device__ __forceinline__ void mainloop(DkvAcc& acc_dk, DkvAcc& acc_dv, int step, int left) {
    ScoreAcc acc_s, acc_dp;
    DqAcc acc_dq;
    RowStats r_lse;
    const PipelineState<1> kv_state = backward_sm90_kv_state(work_state);
    s.k_pipeline.wait(kv_state);
    zero_unseen_keys();
    release_ds_buffers(step);
    // From the third query tile on, each iteration also computes dQ of the tile two steps before.
    const bool has_two = left > 1;
    left -= 2;
#pragma unroll 1
    for (const int first_end = step + (has_two ? 2 : 1); step < first_end; ++step) {
      const bool is_edge = mma_s(acc_s, r_lse, step);
      s.v_pipeline.wait(kv_state);
      mma_dp(acc_dp, step);
      mma_dv_dk(acc_s, acc_dp, r_lse, acc_dv, acc_dk, step, is_edge);
    }
    // NOTE: at the start of an iteration, no wgmma is in flight whose result the iteration reads.
    // Otherwise ptxas would insert a wait directly after that wgmma (C7510).
#pragma unroll 1
    for (; left > 0; --left, ++step) {
      mma_dq(acc_dq, step - 2);
      const bool is_edge = mma_s(acc_s, r_lse, step);
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

  // Wait for Q, then issue S^T = K Q^T. Return whether the mask hides some of the scores.
  __device__ __forceinline__ bool mma_s(ScoreAcc& acc_s, RowStats& r_lse, int step) {
    const State state = state_of(step);
    s.q_pipeline.wait(state);
    const BackwardQueryTile tile = query_tile(state);
    zero_unseen_rows(state, state, tile.unseen_rows);
    discard_accumulators(acc_s);
    gemm_ss<kOfS>(acc_s, s_k, s_q, state.stage);
    if constexpr (Config::kEarlyLse) load_stats(r_lse, s.stats[state.stage].lse);
    return tile.is_edge;
  }

  // Wait for dO, then issue dP^T - delta = V dO^T - delta.
  __device__ __forceinline__ void mma_dp(ScoreAcc& acc_dp, int step) {
    const State state = state_of(step);
    s.dout_pipeline.wait(state);
    if constexpr (Config::kStatSlice) {
      discard_accumulators(acc_dp);
    } else {
      init_dp(acc_dp, s.stats[state.stage].delta);
    }
    gemm_ss<kOfDp>(acc_dp, s_v, s_dout, state.stage);
  }

  // Wait for S and dP, and convert them into P and dS. Issue dV += P^T dO and dK += dS^T Q, and
  // store dS. Then release Q and dO.
  __device__ __forceinline__ void mma_dv_dk(ScoreAcc& acc_s, ScoreAcc& acc_dp, RowStats& r_lse,
                                            DkvAcc& acc_dv, DkvAcc& acc_dk, int step,
                                            bool is_edge) {
    const State state = state_of(step);
    ScoreOperand p16, ds16;
    if (warpgroup == 0) {
      named_barrier_wait<kExpWg0, kBackwardConsumerThreads>();
    } else {
      named_barrier_wait<kExpWg0 + 1, kBackwardConsumerThreads>();
    }
    s_to_p(p16, acc_s, r_lse, state, is_edge);
    mma_dv(acc_dv, p16, state);
    // NOTE: if the arrival came before the product, ptxas would move it to before the exponentials.
    if (warpgroup == 0) {
      named_barrier_arrive<kExpWg0 + 1, kBackwardConsumerThreads>();
    } else {
      named_barrier_arrive<kExpWg0, kBackwardConsumerThreads>();
    }
    wgmma_wait<1>();
    warpgroup_fence_operand(acc_dp);
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

  // Returns the address of this lane's stmatrix row in the first buffer of dS. stmatrix transposes
  // the fragments of dS^T. Matrices 0 and 1 have rows 0 to 7, and matrices 2 and 3 have rows 8 to
  // 15. Matrices 0 and 2 have the first 8 of 16 keys, and matrices 1 and 3 have the last 8.
  __device__ __forceinline__ uint32_t ds_lane_address(int thread) const {
    const int lane = thread % 32, warp = thread / 32 % 4;
    const int row = lane % 8 + lane / 16 * 8, chunk = 2 * warp + lane / 8 % 2;
    return s_ds + warpgroup * Config::kDsHalfBytes + row * kSwizzleRowBytes +
           (swizzled_chunk(row, chunk) << 4);
  }

  // Store dS to shared memory, for the dQ product.
  __device__ __forceinline__ void store_ds(const ScoreOperand& ds16, const State& state) const {
    uint32_t s_lane;
    if constexpr (Config::kMasked) {
      // NOTE: the kernel for a general mask has no free register for the address. The asm keeps the
      // compiler from moving the computation out of the loop.
      int thread = threadIdx.x;
      asm volatile("" : "+r"(thread));
      s_lane = ds_lane_address(thread);
    } else {
      s_lane = s_ds_lane;
    }
    s_lane += state.stage * Config::kDsBytes;
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      store_matrix_4_transposed(s_lane + slice * 16 * kSwizzleRowBytes, ds16[slice]);
    }
  }

  // Wait for dS of both warpgroups and issue the warpgroup's slice of dQ^T = K^T dS^T.
  __device__ __forceinline__ void mma_dq(DqAcc& acc_dq, int step) {
    const State state = state_of(step);
    s.ds_pipeline.wait(state);
    gemm_dq(acc_dq, s_ds + state.stage * Config::kDsBytes);
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

  // Issue acc = A B^T (kOfS) or acc += A B^T (kOfDp). With a stat slice, issue acc = A B^T - lse
  // (kOfS) or acc = A B^T - delta (kOfDp). A is the warpgroup's 64 keys in s_keys. B is kRows query
  // rows in the stage of s_rows.
  enum ScoreProduct { kOfS, kOfDp };
  template <ScoreProduct kOf>
  __device__ __forceinline__ void gemm_ss(ScoreAcc& acc, uint32_t s_keys, uint32_t s_rows,
                                          int stage) const {
    constexpr bool kAccumulates = kOf == kOfDp || Config::kStatSlice;
    const TileDescriptor a(s_keys + warpgroup * 64 * kSwizzleRowBytes, 16),
        b(s_rows + stage * Config::kQueryBytes, 16);
    wgmma_fence();
    if constexpr (Config::kStatSlice) {
      Wgmma<__nv_bfloat16, kRows>::template multiply<0>(
          acc, stat_selector(kOf).words,
          half_slice_descriptor(shared_address(s.stats[stage].values)), 0);
    }
#pragma unroll
    for (int slice = 0; slice < kDim / 16; ++slice) {
      const int box = slice / 4, in_row = slice % 4 * 32;
      Wgmma<T, kRows>::template multiply<0, 0>(acc, a.offset(box * Config::kKeyBoxBytes + in_row),
                                               b.offset(box * Config::kQueryBoxBytes + in_row),
                                               kAccumulates || slice > 0);
    }
    wgmma_commit();
  }
  // Operand A of the stat slice in registers: every row is 1 in columns 0 to 2 (lse), or in columns
  // 3 to 5 (delta), and 0 in the others.
  struct StatSelector {
    uint32_t words[4];
  };
  static __device__ __forceinline__ StatSelector stat_selector(ScoreProduct of) {
    constexpr uint32_t kLowOne = 0x3f80, kHighOne = kLowOne << 16;
    const int pair = lane() % 4;  // the thread has columns 2 * pair and 2 * pair + 1
    uint32_t word = 0;
    if (of == kOfS) word = pair == 0 ? kLowOne | kHighOne : pair == 1 ? kLowOne : 0;
    if (of == kOfDp) word = pair == 1 ? kHighOne : pair == 2 ? kLowOne | kHighOne : 0;
    return {{word, word, 0, 0}};
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
    const int begin = first_live() - work().first_key, end = end_live() - work().first_key;
    if (begin <= 0 && (!Config::kMasked || end >= Config::kKeys)) return;
    Base::template zero_rows<Config::kBoxes, Config::kKeyBoxBytes>(
        s.k, Config::kKeys, [&](int key) { return key < begin || key >= end; });
    async_fence();
    named_barrier_wait<kUnseenZeroed, kBackwardConsumerThreads>();
  }
};
#endif

}  // namespace torchweld
