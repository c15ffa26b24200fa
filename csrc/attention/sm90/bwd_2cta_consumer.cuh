// What a consumer warpgroup of attention's gradient on Hopper does above 128 columns. It has the
// block's 64 keys, half of the rows of their scores, and half of the columns of dK and dV. P^T and
// dS^T of its own rows are first operands in registers, those of the others come from shared
// memory.
#pragma once

#include "attention/sm90/bwd_2cta_block.cuh"
#include "attention/sm90/bwd_scores.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
template <typename Config>
struct Backward2CtaConsumer : BackwardSm90Scores<Config> {
  using Base = BackwardSm90Scores<Config>;
  using T = typename Config::T;
  using Base::begin_differences, Base::begin_walk, Base::capped, Base::clear_rows,
      Base::differentiate, Base::end_live, Base::exponentiate, Base::exponentiate_capped,
      Base::first_live, Base::first_row, Base::hide, Base::is_edge, Base::lane, Base::load_stats,
      Base::pack, Base::warp;
  using Base::p, Base::s, Base::warpgroup, Base::kScoreRows, Base::kRowSlices, Base::kLine;
  using typename Base::Packed, typename Base::Params, typename Base::Place, typename Base::RowStats,
      typename Base::Scores, typename Base::Shared, typename Base::Walk;
  // Of dK and dV, a warpgroup's.
  static constexpr int kLines = Config::kLines / 2, kValueLines = Config::kValueLines / 2;
  using DoutPlace = PipelineState<1>;
  using Sums = float[kLines * 32];
  using ValueSums = float[kValueLines * 32];
  using Share = float[Config::kShareFloats];

  uint32_t s_k, s_v, s_q, s_dout, s_p, s_ds;
  uint32_t s_lane;  // where this lane's rows of stmatrix start in a tile of P or dS

  __device__ __forceinline__ Backward2CtaConsumer(const Params& p, Shared& s, int warpgroup)
      : Base(p, s, warpgroup) {
    s_k = shared_address(s.k);
    s_v = shared_address(s.v);
    s_q = shared_address(s.q[0]);
    s_dout = shared_address(s.dout[0]);
    s_p = shared_address(s.probabilities);
    s_ds = shared_address(s.ds);
    // The fragments are transposed: of 16 rows and 16 keys, the two halves of the keys come first.
    const int row = lane() % 8 + lane() / 16 * 8, piece = 2 * warp() + lane() / 8 % 2;
    s_lane = (first_row() + row) * kLine + (swizzled_chunk(row, piece) << 4);
  }

  __device__ __forceinline__ void run() {
    Sums r_dk;
    ValueSums r_dv;
#pragma unroll
    for (float& x : r_dk) x = 0.f;
#pragma unroll
    for (float& x : r_dv) x = 0.f;
    const int steps = s.work.steps();
    if (steps > 0) walk(r_dk, r_dv, steps);
    // V was last read before both met, K may still be in use.
    const int first_line = warpgroup * kLines, first_value_line = warpgroup * kValueLines;
    Base::template store<true>(r_dv, s_v + first_value_line * Config::kKeyStretch, 0,
                               first_value_line, p.dvalue, 1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kScoresWritten, kBackwardConsumers>();
    Base::template store<false>(r_dk, s_k + first_line * Config::kKeyStretch, 0, first_line, p.dkey,
                                p.args.params.scale);
    tma_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t neighbour() { return Config::rank() ^ 1; }
  // A tile that both blocks' loads fill.
  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    __syncwarp();
    if (lane() == 0) {
      mbarrier_arrive(s_empty);
      mbarrier_arrive_at(s_empty, neighbour());
    }
  }

  __device__ __forceinline__ void walk(Sums& r_dk, ValueSums& r_dv, int steps) {
    Place at;
    DoutPlace dout_at;
    Scores r_s, r_dp;
    Share r_dq;
    RowStats r_lse;
    Walk walk = begin_walk();
    mbarrier_wait(&s.k_full, 0);
    clear_keys();
    bool edge = start_scores(r_s, r_lse, at, dout_at, walk);
    mbarrier_wait(&s.v_full, 0);
    start_differences(r_dp, dout_at);
    probabilities<true>(r_s, r_dp, r_lse, r_dv, at, walk, edge);
    differences(r_s, r_dp, r_dk, at, dout_at, edge);
    // NOTE: the loop is cut where no sums are on their way that are read in its next turn; the
    // assembler would wait for them at once.
#pragma unroll 1
    for (; steps > 1; --steps) {
      queries(r_dq, r_dk, at, dout_at);
      at.advance();
      dout_at.advance();
      walk.advance();
      edge = start_scores(r_s, r_lse, at, dout_at, walk);
      wgmma_wait<1>();
      named_barrier_arrive(kShareDone + warpgroup, kBackwardConsumers);
      put(r_dq);
      start_differences(r_dp, dout_at);
      hand_over();
      probabilities<false>(r_s, r_dp, r_lse, r_dv, at, walk, edge);
      differences(r_s, r_dp, r_dk, at, dout_at, edge);
    }
    queries(r_dq, r_dk, at, dout_at);
    wgmma_wait<0>();
    put(r_dq);
    hand_over();
    warpgroup_fence_operand(r_dk);
    warpgroup_fence_operand(r_dv);
  }

  // r_s = S^T of a tile, on its way. Returns whether some of them are hidden.
  __device__ __forceinline__ bool start_scores(Scores& r_s, RowStats& r_lse, const Place& at,
                                               const DoutPlace& dout_at, const Walk& walk) {
    s.q_pipeline.wait(at);
    clear_rows(at, dout_at, walk);
    discard_accumulators(r_s);
    scores<Config::kDepthLines, 0>(r_s, s_k, s_q + at.stage * Config::kRowBytes);
    if constexpr (!Config::kMasked) load_stats(r_lse, s.lse[at.stage]);
    return is_edge(at, walk);
  }

  // r_dp = dP^T - delta, on its way.
  __device__ __forceinline__ void start_differences(Scores& r_dp, const DoutPlace& dout_at) {
    s.dout_pipeline.wait(dout_at);
    begin_differences(r_dp, s.delta[0]);
    scores<Config::kValueLines, 1>(r_dp, s_v, s_dout);
  }

  // r_s: S^T on its way -> P^T;  r_dp is there;  dV += P^T dO on its way.
  template <bool kFirst>
  __device__ __forceinline__ void probabilities(Scores& r_s, Scores& r_dp, RowStats& r_lse,
                                                ValueSums& r_dv, const Place& at, const Walk& walk,
                                                bool edge) {
    wgmma_wait<1>();
    warpgroup_fence_operand(r_s);
    Packed r_p16;
    if (capped()) {
      exponentiate_capped(r_s, r_p16, at, edge);
    } else {
      if constexpr (Config::kMasked) load_stats(r_lse, s.lse[at.stage]);
      exponentiate(r_s, r_lse);
      if (edge) hide(r_s, at, walk.tile);
      pack(r_p16, r_s);
    }
    accumulate(r_dv, r_p16, s_dout);
    // Where P goes was the neighbour's dS.
    if constexpr (!kFirst) named_barrier_wait(kShareDone + (warpgroup ^ 1), kBackwardConsumers);
    write(s_p, r_p16);
    named_barrier_wait<kProbabilitiesWritten, kBackwardConsumers>();
    accumulate_others(r_dv, s_p, s_dout);
    wgmma_wait<2>();
    warpgroup_fence_operand(r_dp);
  }

  // r_dp: dP^T - delta -> dS^T, which goes to shared memory too;  dK += dS^T Q of its own rows on
  // its way;  dV is done.
  __device__ __forceinline__ void differences(const Scores& r_s, Scores& r_dp, Sums& r_dk,
                                              const Place& at, const DoutPlace& dout_at,
                                              bool edge) {
    differentiate(r_s, r_dp, edge);
    Packed r_ds16;
    pack(r_ds16, r_dp);
    accumulate(r_dk, r_ds16, s_q + at.stage * Config::kRowBytes);
    // NOTE: the products from the last tile's dS, which lies there, are done: both warpgroups met
    // after them. Its copy to the neighbour has to be waited for.
    mbarrier_wait(&s.ds_sent, dout_at.parity ^ 1);
    write(s_ds, r_ds16);
    wgmma_wait<1>();
    release(&s.dout_pipeline.empty[0]);
    if (threadIdx.x == 128) mbarrier_arrive_expect_tx(&s.ds_full, Config::kScoreBytes);
    __syncwarp();
    if (lane() == 0) mbarrier_arrive_at(&s.ds_wanted, neighbour());
    named_barrier_arrive(kSend, kBackwardSendThreads);
  }

  // dK += dS^T Q of the others' rows;  r_dq: the share of dQ on its way;  dK is done, and Q is
  // given back.
  __device__ __forceinline__ void queries(Share& r_dq, Sums& r_dk, const Place& at,
                                          const DoutPlace& dout_at) {
    named_barrier_wait<kScoresWritten, kBackwardConsumers>();
    accumulate_others(r_dk, s_ds, s_q + at.stage * Config::kRowBytes);
    const int line = Config::rank() * 2 + warpgroup;
    discard_accumulators(r_dq);
    multiply_dq<0>(r_dq, s_k + line * Config::kKeyStretch, s_ds);
    wgmma_wait<1>();
    release(&s.q_pipeline.empty[at.stage]);
    mbarrier_wait(&s.ds_full, dout_at.parity);
    if (threadIdx.x == 128) mbarrier_arrive_at(&s.ds_sent, neighbour());
    __syncwarp();
    multiply_dq<1>(r_dq, shared_address(s.k_neighbour) + warpgroup * Config::kKeyStretch, s_p);
  }

  // To the adder.
  // NOTE: to wait until it has arrived takes long; other products are started before.
  __device__ __forceinline__ void put(Share& r_dq) {
    warpgroup_fence_operand(r_dq);
    named_barrier_wait(kShareEmpty + warpgroup, kBackwardShareThreads);
    float4* s_to = reinterpret_cast<float4*>(s.dq[0][warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Config::kShareFloats; i += 4) {
      s_to[i / 4 * 128] = make_float4(r_dq[i], r_dq[i + 1], r_dq[i + 2], r_dq[i + 3]);
    }
  }
  __device__ __forceinline__ void hand_over() {
    async_fence();
    named_barrier_arrive(kShareFull + warpgroup, kBackwardShareThreads);
  }

  // P^T or dS^T of the warpgroup's rows to shared memory.
  __device__ __forceinline__ void write(uint32_t s_tile, const Packed& r) const {
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      store_matrix_4_transposed(s_tile + s_lane + slice * 16 * kLine, r[slice]);
    }
    async_fence();
  }

  // r = (kKeeps ? r : 0) + (64 keys at s_keys) @ (the warpgroup's rows of those at s_rows)^T.
  template <int kDepthLines, int kKeeps>
  __device__ __forceinline__ void scores(Scores& r, uint32_t s_keys, uint32_t s_rows) const {
    const FreshDescriptor a(s_keys, 16), b(s_rows + first_row() * kLine, 16);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kDepthLines * 4; ++slice) {
      const int stretch = slice / 4, in_line = slice % 4 * 32;
      Wgmma<T, kScoreRows>::template multiply<0, 0>(
          r, a.at(stretch * Config::kKeyStretch + in_line),
          b.at(stretch * Config::kRowStretch + in_line), kKeeps || slice > 0);
    }
    wgmma_commit();
  }

  // r += a @ (the warpgroup's rows and columns of those at s_rows)
  template <int kSums>
  __device__ __forceinline__ void accumulate(float (&r)[kSums], const Packed& a,
                                             uint32_t s_rows) const {
    const FreshDescriptor b(
        s_rows + warpgroup * (kSums / 32) * Config::kRowStretch + first_row() * kLine,
        Config::kRowStretch);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      Wgmma<T, kSums * 2>::template multiply<1>(r, a[slice], b.at(slice * 16 * kLine), 1);
    }
    wgmma_commit();
  }

  // The same with the other warpgroup's rows, whose scores are at s_scores.
  template <int kSums>
  __device__ __forceinline__ void accumulate_others(float (&r)[kSums], uint32_t s_scores,
                                                    uint32_t s_rows) const {
    const uint32_t first = Config::first_row(warpgroup ^ 1) * kLine;
    const FreshDescriptor a(s_scores + first, Config::kScoreBytes),
        b(s_rows + warpgroup * (kSums / 32) * Config::kRowStretch + first, Config::kRowStretch);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kRowSlices; ++slice) {
      Wgmma<T, kSums * 2>::template multiply<1, 1>(r, a.at(slice * 16 * kLine),
                                                   b.at(slice * 16 * kLine), 1);
    }
    wgmma_commit();
  }

  // r = (kKeeps ? r : 0) + (64 columns of 64 keys at s_keys)^T @ (dS at s_scores)^T
  template <int kKeeps>
  __device__ __forceinline__ void multiply_dq(Share& r, uint32_t s_keys, uint32_t s_scores) const {
    const FreshDescriptor a(s_keys, Config::kKeyStretch), b(s_scores, 16);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kBlockKeys / 16; ++slice) {
      Wgmma<T, Config::kShareRows>::template multiply<1, 0>(r, a.at(slice * 16 * kLine),
                                                            b.at(slice * 32), kKeeps || slice > 0);
    }
    wgmma_commit();
  }

  // Zeroes keys that nobody sees, for dQ. What lies behind the last key arrived as zeros.
  __device__ __forceinline__ void clear_keys() const {
    const int first = s.work.first_key;
    if (first_live() <= first && (!Config::kMasked || end_live() >= first + Config::kKeys)) return;
    const auto clear = [&](auto lines, char* s_tile, int block) {
      const int begin = first_live() - (first + block * Config::kBlockKeys),
                end = end_live() - (first + block * Config::kBlockKeys);
      Base::template clear_lines<lines.value, Config::kKeyStretch>(
          s_tile, Config::kBlockKeys, [&](int key) { return key < begin || key >= end; });
    };
    clear(std::integral_constant<int, Config::kLines>(), s.k, Config::rank());
    clear(std::integral_constant<int, Config::kLines / 2>(), s.k_neighbour,
          static_cast<int>(neighbour()));
    async_fence();
    named_barrier_wait<kCleared, kBackwardConsumers>();
  }
};
#endif

}  // namespace torchweld
