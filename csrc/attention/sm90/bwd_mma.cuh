// The matmuls of a consumer warpgroup of attention's backward on Hopper, for the kernels that use
// one CTA. The warpgroup has 64 keys of the CTA. The scores are transposed: the keys are the M
// dimension of wgmma. Therefore P^T and dS^T can be register operands of the products dV += P^T dO
// and dK += dS^T Q.
#pragma once

#include "attention/sm90/bwd_scores.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct BackwardSm90Mma : BackwardSm90Scores<Config> {
  using Base = BackwardSm90Scores<Config>;
  using T = typename Config::T;
  using Base::end_live, Base::first_live, Base::init_dp, Base::lane, Base::load_stats,
      Base::query_tile, Base::work, Base::zero_unseen_rows;
  using Base::p, Base::s, Base::warpgroup, Base::kRows, Base::kRowSlices;
  using typename Base::Params, typename Base::RowStats, typename Base::ScoreAcc,
      typename Base::ScoreOperand, typename Base::Shared, typename Base::State;
  static constexpr int kDim = Config::kDim, kDimV = Config::kDimV;
  using DkAcc = float[kDim / 2];
  using DvAcc = float[kDimV / 2];
  using DsState = PipelineState<Config::kDsStages>;

  uint32_t s_k, s_v, s_q, s_dout, s_ds;
  uint32_t s_ds_lane;  // the address of this lane's stmatrix row; not used under a general mask

  __device__ __forceinline__ BackwardSm90Mma(const Params& p, Shared& s, int warpgroup)
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

  // `step` is the index of a query tile. It counts the query tiles of all work tiles of the CTA.
  // Returns the stage of Q and dO of this query tile.
  static __device__ __forceinline__ State state_of(int step) {
    return pipeline_state_of<Config::kStages>(step);
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

  // Wait for Q, then issue S^T = K Q^T. Return whether the mask hides some of the scores.
  __device__ __forceinline__ bool mma_s(ScoreAcc& acc_s, int step) {
    const State state = state_of(step);
    s.q_pipeline.wait(state);
    const BackwardQueryTile tile = query_tile(state);
    zero_unseen_rows(state, state, tile.unseen_rows);
    discard_accumulators(acc_s);
    gemm_ss<kOfS>(acc_s, s_k, s_q, state.stage);
    return tile.is_edge;
  }

  // Wait for dO, then issue dP^T - delta = V dO^T - delta. With dropout, issue dP^T.
  __device__ __forceinline__ void mma_dp(ScoreAcc& acc_dp, int step) {
    const State state = state_of(step);
    s.dout_pipeline.wait(state);
    if constexpr (Config::kStatSlice || Config::kDropout) {
      discard_accumulators(acc_dp);
    } else {
      init_dp(acc_dp, s.stats[state.stage].delta);
    }
    gemm_ss<kOfDp>(acc_dp, s_v, s_dout, state.stage);
  }

  // Issue dV += P^T dO.
  __device__ __forceinline__ void mma_dv(DvAcc& acc_dv, const ScoreOperand& p16,
                                         const State& state) const {
    gemm_rs(acc_dv, p16, s_dout + state.stage * Config::kDoutBytes);
  }

  // Issue dK += dS^T Q.
  __device__ __forceinline__ void mma_dk(DkAcc& acc_dk, const ScoreOperand& ds16,
                                         const State& state) const {
    gemm_rs(acc_dk, ds16, s_q + state.stage * Config::kQueryBytes);
  }

  // Issue acc = 64 columns of dQ, as K^T dS^T over 128 keys. K's columns are in `box`, and
  // s_ds_rows is the first query row of dS.
  template <int kAcc>
  __device__ __forceinline__ void gemm_dq(float (&acc)[kAcc], int box, uint32_t s_ds_rows) const {
    const TileDescriptor a(s_k + box * Config::kKeyBoxBytes, Config::kKeyBoxBytes),
        b(s_ds_rows, 16);
    discard_accumulators(acc);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kKeys / 16; ++slice) {
      Wgmma<T, kAcc * 2>::template multiply<1, 0>(
          acc, a.offset(slice * 16 * kSwizzleRowBytes),
          b.offset(slice / 4 * Config::kDsBoxBytes + slice % 4 * 32), slice > 0);
    }
    wgmma_commit();
  }

  // Returns the address of this lane's stmatrix row in the first buffer of dS.
  __device__ __forceinline__ uint32_t ds_lane_address(int thread) const {
    return s_ds + warpgroup * Config::kDsBoxBytes +
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
    for (int slice = 0; slice < kRowSlices; ++slice) {
      store_matrix_4_transposed(s_lane + slice * 16 * kSwizzleRowBytes, ds16[slice]);
    }
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

 private:
  // Issue acc = A B^T (kOfS) or acc += A B^T (kOfDp). With a stat slice, issue acc = A B^T - lse
  // (kOfS) or acc = A B^T - delta (kOfDp). With dropout, issue acc = A B^T. A is the warpgroup's 64
  // keys in s_keys. B is kRows query rows in the stage of s_rows.
  enum ScoreProduct { kOfS, kOfDp };
  template <ScoreProduct kOf>
  __device__ __forceinline__ void gemm_ss(ScoreAcc& acc, uint32_t s_keys, uint32_t s_rows,
                                          int stage) const {
    constexpr int kBoxesOf = kOf == kOfS ? Config::kBoxes : Config::kBoxesV;
    constexpr bool kAccumulates = (kOf == kOfDp && !Config::kDropout) || Config::kStatSlice;
    const TileDescriptor a(s_keys + warpgroup * 64 * kSwizzleRowBytes, 16),
        b(s_rows + stage * kBoxesOf * Config::kQueryBoxBytes, 16);
    wgmma_fence();
    if constexpr (Config::kStatSlice) {
      Wgmma<__nv_bfloat16, kRows>::template multiply<0>(
          acc, stat_selector(kOf).words,
          half_slice_descriptor(shared_address(s.stats[stage].values)), 0);
    }
#pragma unroll
    for (int slice = 0; slice < kBoxesOf * 4; ++slice) {
      const int box = slice / 4, in_row = slice % 4 * 32;
      Wgmma<T, kRows>::template multiply<0, 0>(acc, a.offset(box * Config::kKeyBoxBytes + in_row),
                                               b.offset(box * Config::kQueryBoxBytes + in_row),
                                               kAccumulates || slice > 0);
    }
    wgmma_commit();
  }
  // Operand A of the stat slice in registers. In the product for S, every row is 1 in columns 0 to
  // 2, which select lse. In the product for dP, every row is 1 in columns 3 to 5, which select
  // delta. All other elements are 0.
  struct StatSelector {
    uint32_t words[4];
  };
  static __device__ __forceinline__ StatSelector stat_selector(ScoreProduct of) {
    constexpr uint32_t kLowOne = 0x3f80, kHighOne = kLowOne << 16;
    int pair = lane() % 4;  // the thread has columns 2 * pair and 2 * pair + 1
    // NOTE: the kernel for a general mask has no free register for the words. The asm keeps the
    // compiler from computing the words before the loop.
    if constexpr (Config::kMasked) asm volatile("" : "+r"(pair));
    uint32_t word = 0;
    if (of == kOfS) word = pair == 0 ? kLowOne | kHighOne : pair == 1 ? kLowOne : 0;
    if (of == kOfDp) word = pair == 1 ? kHighOne : pair == 2 ? kLowOne | kHighOne : 0;
    return {{word, word, 0, 0}};
  }

  // Issue acc += A B. A is P^T or dS^T in registers. B is kRows query rows in s_rows.
  template <int kAcc>
  __device__ __forceinline__ void gemm_rs(float (&acc)[kAcc], const ScoreOperand& a,
                                          uint32_t s_rows) const {
    const TileDescriptor b(s_rows, Config::kQueryBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      Wgmma<T, kAcc * 2>::template multiply<1>(acc, a[slice],
                                               b.offset(slice * 16 * kSwizzleRowBytes), 1);
    }
    wgmma_commit();
  }
};
#endif

}  // namespace torchweld
