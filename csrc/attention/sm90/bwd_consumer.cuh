// What a consumer warpgroup of attention's gradient on Hopper does. It has 64 of the block's keys,
// whose scores are the rows of its products: S^T and dP^T become P^T and dS^T in registers, where
// they are the first operands of dV and dK.
#pragma once

#include "attention/sm90/bwd_scores.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct BackwardSm90Consumer : BackwardSm90Scores<Config> {
  using Base = BackwardSm90Scores<Config>;
  using T = typename Config::T;
  using Base::begin_differences, Base::begin_walk, Base::capped, Base::clear_rows,
      Base::differentiate, Base::end_live, Base::exponentiate, Base::exponentiate_capped,
      Base::first_live, Base::hide, Base::is_edge, Base::lane, Base::load_stats, Base::pack,
      Base::release, Base::warp;
  using Base::p, Base::s, Base::warpgroup, Base::kRows, Base::kRowSlices, Base::kLine;
  using typename Base::Packed, typename Base::Params, typename Base::Place, typename Base::RowStats,
      typename Base::Scores, typename Base::Shared, typename Base::Walk;
  static constexpr int kDim = Config::kDim;
  static constexpr int kDimSlices = kDim / 16, kKeySlices = 8;
  // lse is read before the scores are there, where there are registers for it.
  static constexpr bool kStatsAhead =
      kDim == 128 || (!Config::kMasked && std::is_same_v<T, __nv_bfloat16>);
  using Sums = float[kDim / 2];
  using Share = float[Config::kShareFloats];

  uint32_t s_k, s_v, s_q, s_dout, s_ds;
  uint32_t s_ds_lane;  // where this lane's rows of stmatrix start

  __device__ __forceinline__ BackwardSm90Consumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {
    s_k = shared_address(s.k);
    s_v = shared_address(s.v);
    s_q = shared_address(s.q[0]);
    s_dout = shared_address(s.dout[0]);
    s_ds = shared_address(s.ds[0]);
    // dS^T's fragments are transposed: of 16 rows of dS and 16 keys, the two halves of the keys
    // come first.
    const int row = lane() % 8 + lane() / 16 * 8, piece = 2 * warp() + lane() / 8 % 2;
    s_ds_lane =
        s_ds + warpgroup * Config::kScoreHalf + row * kLine + (swizzled_chunk(row, piece) << 4);
    // It stays in one register, where there is one.
    if constexpr (!Config::kMasked) asm volatile("" : "+r"(s_ds_lane));
  }

  __device__ __forceinline__ void run() {
    Sums r_dk, r_dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) r_dk[i] = r_dv[i] = 0.f;
    const int steps = s.work.steps();
    if (steps > 0) walk(r_dk, r_dv, steps);
    // Of V a warpgroup reads its own lines alone, of K both read all.
    Base::template store<true>(r_dv, s_v, warpgroup * 64, 0, p.dvalue,
                               1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kScoresWritten, kBackwardConsumers>();
    Base::template store<false>(r_dk, s_k, warpgroup * 64, 0, p.dkey, p.args.params.scale);
    tma_wait_read<0>();
  }

 private:
  __device__ __forceinline__ void walk(Sums& r_dk, Sums& r_dv, int steps) {
    Place at;
    Scores r_s, r_dp;
    Share r_dq;
    RowStats r_lse;
    Walk walk = begin_walk();
    mbarrier_wait(&s.k_full, 0);
    clear_keys();
    bool edge = start_scores(r_s, r_lse, at, walk);
    mbarrier_wait(&s.v_full, 0);
    start_differences(r_dp, at);
    probabilities(r_s, r_dp, r_lse, r_dv, at, walk, edge);
    differences(r_s, r_dp, r_dk, at, edge);
    // NOTE: the loop is cut where no sums are on their way that are read in its next turn; the
    // assembler would wait for them at once. The fewer products go on there, the fewer registers
    // it takes.
#pragma unroll 1
    for (; steps > 1; --steps) {
      queries(r_dq, at);
      at.advance();
      walk.advance();
      edge = start_scores(r_s, r_lse, at, walk);
      wgmma_wait<1>();
      put(r_dq, at.stage ^ 1);
      start_differences(r_dp, at);
      hand_over(at.stage ^ 1);
      probabilities(r_s, r_dp, r_lse, r_dv, at, walk, edge);
      differences(r_s, r_dp, r_dk, at, edge);
    }
    queries(r_dq, at);
    wgmma_wait<0>();
    put(r_dq, at.stage);
    hand_over(at.stage);
    warpgroup_fence_operand(r_dk);
    warpgroup_fence_operand(r_dv);
  }

  // r_s = S^T of a tile, on its way. Returns whether some of them are hidden.
  __device__ __forceinline__ bool start_scores(Scores& r_s, RowStats& r_lse, const Place& at,
                                               const Walk& walk) {
    s.q_pipeline.wait(at);
    clear_rows(at, at, walk);
    discard_accumulators(r_s);
    scores<0>(r_s, s_k, s_q + at.stage * Config::kRowBytes);
    if constexpr (kStatsAhead) load_stats(r_lse, s.lse[at.stage]);
    return is_edge(at, walk);
  }

  // r_dp = dP^T - delta, on its way.
  __device__ __forceinline__ void start_differences(Scores& r_dp, const Place& at) {
    s.dout_pipeline.wait(at);
    begin_differences(r_dp, s.delta[at.stage]);
    scores<1>(r_dp, s_v, s_dout + at.stage * Config::kRowBytes);
  }

  // r_s: S^T on its way -> P^T;  r_dp is there;  dV += P^T dO on its way.
  __device__ __forceinline__ void probabilities(Scores& r_s, Scores& r_dp, RowStats& r_lse,
                                                Sums& r_dv, const Place& at, const Walk& walk,
                                                bool edge) {
    wgmma_wait<1>();
    warpgroup_fence_operand(r_s);
    Packed r_p16;
    if (capped()) {
      exponentiate_capped(r_s, r_p16, at, edge);
    } else {
      if constexpr (!kStatsAhead) load_stats(r_lse, s.lse[at.stage]);
      exponentiate(r_s, r_lse);
      if (edge) hide(r_s, at, walk.tile);
      pack(r_p16, r_s);
    }
    accumulate(r_dv, r_p16, s_dout + at.stage * Config::kRowBytes);
    wgmma_wait<1>();
    warpgroup_fence_operand(r_dp);
  }

  // r_dp: dP^T - delta -> dS^T, which goes to shared memory too;  dK += dS^T Q on its way.
  __device__ __forceinline__ void differences(const Scores& r_s, Scores& r_dp, Sums& r_dk,
                                              const Place& at, bool edge) {
    differentiate(r_s, r_dp, edge);
    Packed r_ds16;
    pack(r_ds16, r_dp);
    accumulate(r_dk, r_ds16, s_q + at.stage * Config::kRowBytes);

    // NOTE: two tiles of dS. A warpgroup that writes one has passed the barrier of the other,
    // before which both had waited for their products from this one.
    const uint32_t ds_at = at.stage * Config::kScoreBytes;
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      store_matrix_4_transposed(s_ds_lane + ds_at + slice * 16 * kLine, r_ds16[slice]);
    }
    async_fence();
    wgmma_wait<Config::kKeysAhead ? 1 : 0>();
  }

  // r_dq: dQ's share on its way;  dV and dK are done, and the stage is given back.
  __device__ __forceinline__ void queries(Share& r_dq, const Place& at) {
    named_barrier_wait<kScoresWritten, kBackwardConsumers>();
    multiply_dq(r_dq, s_ds + at.stage * Config::kScoreBytes);
    wgmma_wait<1>();
    release(&s.q_pipeline.empty[at.stage]);
    release(&s.dout_pipeline.empty[at.stage]);
  }

  // To the adder whose turn it is: they alternate as the stages do.
  // NOTE: to wait until it has arrived takes long; other products are started before.
  __device__ __forceinline__ void put(Share& r_dq, int adder) {
    static_assert(Config::kAdders == Config::kStages);
    warpgroup_fence_operand(r_dq);
    named_barrier_wait(kShareEmpty + 2 * adder + warpgroup, kBackwardShareThreads);
    float4* s_to = reinterpret_cast<float4*>(s.dq[adder][warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Config::kShareFloats; i += 4) {
      s_to[i / 4 * 128] = make_float4(r_dq[i], r_dq[i + 1], r_dq[i + 2], r_dq[i + 3]);
    }
  }
  __device__ __forceinline__ void hand_over(int adder) {
    async_fence();
    named_barrier_arrive(kShareFull + 2 * adder + warpgroup, kBackwardShareThreads);
  }

  // r = (kKeeps ? r : 0) + (the warpgroup's keys at s_keys) @ (kRows rows at s_rows)^T.
  template <int kKeeps>
  __device__ __forceinline__ void scores(Scores& r, uint32_t s_keys, uint32_t s_rows) const {
    const FreshDescriptor a(s_keys + warpgroup * Config::kHalfStretch, 16), b(s_rows, 16);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kDimSlices; ++slice) {
      const int stretch = slice / 4, in_line = slice % 4 * 32;
      Wgmma<T, kRows>::template multiply<0, 0>(r, a.at(stretch * Config::kKeyStretch + in_line),
                                               b.at(stretch * Config::kRowStretch + in_line),
                                               kKeeps || slice > 0);
    }
    wgmma_commit();
  }

  // r += a @ (kRows rows at s_rows)
  __device__ __forceinline__ void accumulate(Sums& r, const Packed& a, uint32_t s_rows) const {
    const FreshDescriptor b(s_rows, Config::kRowStretch);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      Wgmma<T, kDim>::template multiply<1>(r, a[slice], b.at(slice * 16 * kLine), 1);
    }
    wgmma_commit();
  }

  // r = this warpgroup's share of K^T dS^T.
  __device__ __forceinline__ void multiply_dq(Share& r, uint32_t s_scores) const {
    const int stretch = kDim == 64 ? 0 : warpgroup, first_row = kDim == 64 ? warpgroup : 0;
    const FreshDescriptor a(s_k + stretch * Config::kKeyStretch, Config::kKeyStretch),
        b(s_scores + first_row * (Config::kShareRows * kLine), 16);
    discard_accumulators(r);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kKeySlices; ++slice) {
      Wgmma<T, Config::kShareRows>::template multiply<1, 0>(
          r, a.at(slice * 16 * kLine), b.at(slice / 4 * Config::kScoreHalf + slice % 4 * 32),
          slice > 0);
    }
    wgmma_commit();
  }

  // The same of keys that nobody sees, for dQ.
  __device__ __forceinline__ void clear_keys() const {
    const int begin = first_live() - s.work.first_key, end = end_live() - s.work.first_key;
    // What lies behind the last key arrived as zeros.
    if (begin <= 0 && (!Config::kMasked || end >= Config::kKeys)) return;
    Base::template clear_lines<Config::kLines, Config::kKeyStretch>(
        s.k, Config::kKeys, [&](int key) { return key < begin || key >= end; });
    async_fence();
    named_barrier_wait<kCleared, kBackwardConsumers>();
  }
};
#endif

}  // namespace torchweld
