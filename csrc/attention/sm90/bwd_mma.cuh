// The matmuls of a consumer warpgroup of attention's backward on Hopper. The scores are transposed:
// the keys are the M dimension of wgmma. Therefore P^T and dS^T can be register operands of the
// products dV += P^T dO and dK += dS^T Q.
#pragma once

#include "attention/sm90/bwd_scores.cuh"
#include "device/features.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The low half of a wgmma matrix descriptor, which contains the address. The high half is a
// constant.
// NOTE: the asm hides the value from the compiler, so that the code computes each descriptor again
// for every product. Otherwise the compiler would keep the descriptors of all slices in registers
// throughout the mainloop.
struct TileDescriptor {
  uint32_t low;

  __device__ __forceinline__ TileDescriptor(uint32_t s_tile, uint32_t box_bytes)
      : low(static_cast<uint32_t>(matrix_descriptor(s_tile, box_bytes))) {
    asm volatile("" : "+r"(low));
  }
  __device__ __forceinline__ uint64_t offset(uint32_t bytes) const {
    constexpr uint64_t kHigh = matrix_descriptor(0, 0) >> 32 << 32;
    return kHigh | (low + (bytes >> 4));
  }
};

// With one CTA, a warpgroup computes all columns of dK and dV for its 64 keys. With two CTAs, it
// computes half of the columns for the CTA's 64 keys. The functions issue wgmmas and wait for
// nothing.
template <typename Config>
struct BackwardSm90Mma {
  using T = typename Config::T;
  using Scores = BackwardSm90Scores<Config>;
  using ScoreAcc = typename Scores::ScoreAcc;
  using ScoreOperand = typename Scores::ScoreOperand;
  using State = typename Scores::State;
  using DoutState = typename Scores::DoutState;
  using DkAcc = float[Config::kUsed / 2 / Config::kCtas];
  using DvAcc = float[Config::kUsedV / 2 / Config::kCtas];
  using DqAcc = float[Config::kDqFloats];

  typename Config::Shared& s;
  const int warpgroup;
  const uint32_t s_k = shared_address(s.k), s_v = shared_address(s.v), s_q = shared_address(s.q[0]),
                 s_dout = shared_address(s.dout[0]), s_ds = shared_address(s.ds[0]);

  // Issue S^T = K Q^T.
  __device__ __forceinline__ void issue_s(ScoreAcc& acc_s, const State& state) const {
    discard_accumulators(acc_s);
    gemm_ss<kOfS>(acc_s, s_k, s_q, state.stage);
  }

  // Issue dP^T - delta = V dO^T - delta. If the kernel drops probabilities, issue dP^T. acc_dp is
  // as init_dp leaves it.
  __device__ __forceinline__ void issue_dp(ScoreAcc& acc_dp, const DoutState& state) const {
    gemm_ss<kOfDp>(acc_dp, s_v, s_dout, state.stage);
  }

  // Issue dV += P^T dO over the rows of the warpgroup's scores.
  __device__ __forceinline__ void issue_dv(DvAcc& acc_dv, const ScoreOperand& p16,
                                           const DoutState& state) const {
    gemm_rs(acc_dv, p16, s_dout + state.stage * Config::kDoutBytes);
  }

  // Issue dK += dS^T Q over the rows of the warpgroup's scores.
  __device__ __forceinline__ void issue_dk(DkAcc& acc_dk, const ScoreOperand& ds16,
                                           const State& state) const {
    gemm_rs(acc_dk, ds16, s_q + state.stage * Config::kQueryBytes);
  }

  // Issue acc = (kScaleD ? acc : 0) + K^T dS^T over the keys of a CTA: 64 columns of dQ. K's
  // columns are in `box` of s_keys, and s_ds_rows is the first query row of dS.
  template <int kScaleD = 0>
  __device__ __forceinline__ void issue_dq(DqAcc& acc, uint32_t s_keys, int box,
                                           uint32_t s_ds_rows) const {
    const TileDescriptor a(s_keys + box * Config::kKeyBoxBytes, Config::kKeyBoxBytes),
        b(s_ds_rows, 16);
    if constexpr (kScaleD == 0) discard_accumulators(acc);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Config::kCtaKeys / 16; ++slice) {
      Wgmma<T, Config::kDqRows>::template multiply<1, 0>(
          acc, a.offset(slice * 16 * kSwizzleRowBytes),
          b.offset(slice / 4 * Config::kDsBoxBytes + slice % 4 * 32), kScaleD || slice > 0);
    }
    wgmma_commit();
  }

  // With two CTAs: issue acc += A B over the rows of the other warpgroup's scores. A is P^T or dS^T
  // of these rows in s_scores. B is the query tile of Q or dO in s_rows.
  template <int kAcc>
  __device__ __forceinline__ void issue_other_rows(float (&acc)[kAcc], uint32_t s_scores,
                                                   uint32_t s_rows) const {
    const uint32_t row_bytes = Config::first_row(warpgroup ^ 1) * kSwizzleRowBytes;
    const TileDescriptor a(s_scores + row_bytes, Config::kDsBoxBytes),
        b(s_rows + warpgroup * (kAcc / 32) * Config::kQueryBoxBytes + row_bytes,
          Config::kQueryBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Scores::kRowSlices; ++slice) {
      const int offset = slice * 16 * kSwizzleRowBytes;
      Wgmma<T, kAcc * 2>::template multiply<1, 1>(acc, a.offset(offset), b.offset(offset), 1);
    }
    wgmma_commit();
  }

 private:
  // Issue acc = A B^T (kOfS) or acc += A B^T (kOfDp). With a stat slice, issue acc = A B^T - lse
  // (kOfS) or acc = A B^T - delta (kOfDp). With dropout, issue acc = A B^T. A is the 64 keys of the
  // warpgroup's scores in s_keys. B is the rows of these scores in the stage of s_rows.
  enum ScoreProduct { kOfS, kOfDp };
  template <ScoreProduct kOf>
  __device__ __forceinline__ void gemm_ss(ScoreAcc& acc, uint32_t s_keys, uint32_t s_rows,
                                          int stage) const {
    constexpr int kBoxesOf = kOf == kOfS ? Config::kBoxes : Config::kBoxesV;
    constexpr bool kAccumulates =
        (kOf == kOfDp && (!Config::kDropout || Config::kBias)) || Config::kStatSlice;
    const int key = Config::kCtas == 1 ? warpgroup * 64 : 0;
    const TileDescriptor a(s_keys + key * kSwizzleRowBytes, 16),
        b(s_rows + stage * kBoxesOf * Config::kQueryBoxBytes +
              Config::first_row(warpgroup) * kSwizzleRowBytes,
          16);
    wgmma_fence();
    if constexpr (Config::kStatSlice) {
      Wgmma<__nv_bfloat16, Config::kScoreRows>::template multiply<0>(
          acc, stat_selector(kOf).words,
          half_slice_descriptor(shared_address(s.stats[stage].values)), 0);
    }
#pragma unroll
    for (int slice = 0; slice < (kOf == kOfS ? Config::kUsed : Config::kUsedV) / 16; ++slice) {
      const int box = slice / 4, in_row = slice % 4 * 32;
      Wgmma<T, Config::kScoreRows>::template multiply<0, 0>(
          acc, a.offset(box * Config::kKeyBoxBytes + in_row),
          b.offset(box * Config::kQueryBoxBytes + in_row), kAccumulates || slice > 0);
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
    int pair = threadIdx.x % 4;  // the thread has columns 2 * pair and 2 * pair + 1
    // NOTE: the kernel for a general mask has no free register for the words. The asm keeps the
    // compiler from computing the words before the loop.
    if constexpr (Config::kMasked) asm volatile("" : "+r"(pair));
    uint32_t word = 0;
    if (of == kOfS) word = pair == 0 ? kLowOne | kHighOne : pair == 1 ? kLowOne : 0;
    if (of == kOfDp) word = pair == 1 ? kHighOne : pair == 2 ? kLowOne | kHighOne : 0;
    return {{word, word, 0, 0}};
  }

  // Issue acc += A B. A is P^T or dS^T in registers. B is a part of the query tile in s_rows: the
  // rows of the warpgroup's scores, and the warpgroup's columns of dK or dV.
  template <int kAcc>
  __device__ __forceinline__ void gemm_rs(float (&acc)[kAcc], const ScoreOperand& a,
                                          uint32_t s_rows) const {
    const int first_box = Config::kCtas == 1 ? 0 : warpgroup * (kAcc / 32);
    const TileDescriptor b(s_rows + first_box * Config::kQueryBoxBytes +
                               Config::first_row(warpgroup) * kSwizzleRowBytes,
                           Config::kQueryBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Scores::kRowSlices; ++slice) {
      Wgmma<T, kAcc * 2>::template multiply<1>(acc, a[slice],
                                               b.offset(slice * 16 * kSwizzleRowBytes), 1);
    }
    wgmma_commit();
  }
};
#endif

}  // namespace torchweld
