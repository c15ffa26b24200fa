// What a consumer warpgroup of attention's gradient on Hopper does. It has 64 of the block's keys,
// whose scores are the rows of its products: S^T and dP^T become P^T and dS^T in registers, where
// they are the first operands of dV and dK.
#pragma once

#include "device/sm90/registers.cuh"
#include "device/sm90/stmatrix.cuh"
#include "ops/attention/attention_backward_sm90_block.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// A matrix descriptor by its low half, which has the address; the high half is always the same.
// NOTE: what is made here is made anew for every product. The compiler would keep the descriptors
// of all slices in registers through the walk.
struct FreshDescriptor {
  uint32_t low;

  __device__ __forceinline__ FreshDescriptor(uint32_t s_tile, uint32_t stretch_bytes)
      : low(static_cast<uint32_t>(matrix_descriptor(s_tile, stretch_bytes))) {
    asm volatile("" : "+r"(low));
  }
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    constexpr uint64_t kHigh = matrix_descriptor(0, 0) >> 32 << 32;
    return kHigh | (low + (bytes >> 4));
  }
};

template <typename Config>
struct BackwardSm90Consumer {
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Shared = BackwardSm90Shared<Config>;
  using Place = PipelineState<Config::kStages>;
  static constexpr int kDim = Config::kDim, kRows = Config::kRows;
  static constexpr int kRowSlices = kRows / 16, kDimSlices = kDim / 16, kKeySlices = 8;
  static constexpr int kLine = kSwizzleLineBytes;
  using Scores = float[kRows / 2];
  using Packed = uint32_t[kRowSlices][4];
  using Sums = float[kDim / 2];
  using Share = float[Config::kShareFloats];

  const Params& p;
  Shared& s;
  const int warpgroup;
  uint32_t s_k, s_v, s_q, s_dout, s_ds;
  uint32_t s_ds_lane;  // where this lane's rows of stmatrix start

  __device__ __forceinline__ BackwardSm90Consumer(const Params& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup) {
    s_k = shared_address(s.k);
    s_v = shared_address(s.v);
    s_q = shared_address(s.q[0]);
    s_dout = shared_address(s.dout[0]);
    s_ds = shared_address(s.ds[0]);
    // dS^T's fragments are transposed: of 16 rows of dS and 16 keys, the two halves of the keys
    // come first.
    const int row = lane() % 8 + lane() / 16 * 8, piece = 2 * warp() + lane() / 8 % 2;
    s_ds_lane =
        s_ds + warpgroup * Config::kScoreHalf + row * kLine + (swizzled_piece(row, piece) << 4);
    // It stays in one register, where there is one.
    if constexpr (!Config::kMasked) asm volatile("" : "+r"(s_ds_lane));
  }

  __device__ __forceinline__ void run() {
    Sums r_dk, r_dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) r_dk[i] = r_dv[i] = 0.f;
    const int steps = s.steps();
    if (steps > 0) walk(r_dk, r_dv, steps);
    // Of V a warpgroup reads its own lines alone, of K both read all.
    store(r_dv, s_v, p.dvalue, 1.f / (1 << kProbabilityShift<T>));
    named_barrier_wait<kScoresWritten, kBackwardConsumers>();
    store(r_dk, s_k, p.dkey, p.args.params.scale);
    tma_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ int first_key() const { return s.work.first_key + warpgroup * 64; }
  __device__ __forceinline__ int seqlen_q() const { return static_cast<int>(p.args.rule.seqlen_q); }
  __device__ __forceinline__ int seqlen_k() const { return static_cast<int>(p.args.rule.seqlen_k); }
  // The first key that takes part, and the one behind the last.
  __device__ __forceinline__ int first_live() const {
    if constexpr (Config::kMasked) {
      return s.work.span.begin;
    } else {
      return s.work.span.pad;
    }
  }
  __device__ __forceinline__ int end_live() const {
    if constexpr (Config::kMasked) {
      return s.work.span.end;
    } else {
      return seqlen_k();
    }
  }

  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    if (lane() == 0) mbarrier_arrive(s_empty);
  }
  // `left`: steps from this one on, of which every tile has one for each query head.
  __device__ __forceinline__ void next_tile(Place& at, int& tile, int left) const {
    at.advance();
    if (left % (s.work.end_head - s.work.first_head) == 0) --tile;
  }

  __device__ __forceinline__ void walk(Sums& r_dk, Sums& r_dv, int steps) {
    Place at;
    Scores r_s, r_dp;
    Share r_dq;
    int tile = s.work.last_tile;
    mbarrier_wait(&s.k_full, 0);
    clear_keys();
    start_scores(r_s, at, tile);
    mbarrier_wait(&s.v_full, 0);
    probabilities(r_s, r_dp, r_dv, at, tile);
    differences(r_s, r_dp, r_dk, at, tile);
    // NOTE: the loop is cut where no sums are on their way that are read in its next turn; the
    // assembler would wait for them at once. The fewer products go on there, the fewer registers
    // it takes.
#pragma unroll 1
    for (; steps > 1; --steps) {
      queries(r_dq, at);
      next_tile(at, tile, steps - 1);
      start_scores(r_s, at, tile);
      wgmma_wait<1>();
      hand_over(r_dq);
      probabilities(r_s, r_dp, r_dv, at, tile);
      differences(r_s, r_dp, r_dk, at, tile);
    }
    queries(r_dq, at);
    wgmma_wait<0>();
    hand_over(r_dq);
    wgmma_results(r_dk);
    wgmma_results(r_dv);
  }

  // r_s = S^T of a tile, on its way.
  __device__ __forceinline__ void start_scores(Scores& r_s, const Place& at, int tile) {
    s.q_pipeline.wait(at);
    clear_rows(at, tile);
    scores(r_s, s_k, s_q + at.stage * Config::kRowBytes);
  }

  // r_s: S^T on its way -> P^T;  r_dp = dP^T;  dV += P^T dO on its way.
  __device__ __forceinline__ void probabilities(Scores& r_s, Scores& r_dp, Sums& r_dv,
                                                const Place& at, int tile) {
    const uint32_t s_stage = s_dout + at.stage * Config::kRowBytes;
    s.dout_pipeline.wait(at);
    scores(r_dp, s_v, s_stage);
    wgmma_wait<1>();
    wgmma_results(r_s);
    Packed r_p16;
    if (capped()) {
      exponentiate_capped(r_s, r_p16, at, tile);
    } else {
      exponentiate(r_s, at);
      if (is_edge(at, tile)) hide(r_s, at, tile);
      pack(r_p16, r_s);
    }
    accumulate(r_dv, r_p16, s_stage);
    wgmma_wait<1>();
    wgmma_results(r_dp);
  }

  // r_dp: dP^T -> dS^T, which goes to shared memory too;  dK += dS^T Q on its way.
  __device__ __forceinline__ void differences(const Scores& r_s, Scores& r_dp, Sums& r_dk,
                                              const Place& at, int tile) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const float* s_delta = s.delta[at.stage] + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(s_delta + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = r_dp[n * 4 + i];
        x = r_s[n * 4 + i] * fmaf(x, kUnshift, -(i % 2 ? delta.y : delta.x));
      }
    }
    if (is_edge(at, tile)) {
      // What is hidden has P = 0, and its dP and delta may be NaN.
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) r_dp[i] = r_s[i] == 0.f ? 0.f : r_dp[i];
    }
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

  __device__ __forceinline__ void hand_over(Share& r_dq) {
    wgmma_results(r_dq);
    named_barrier_wait(kShareEmpty + warpgroup, kBackwardShareThreads);
    float4* s_to = reinterpret_cast<float4*>(s.dq[warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Config::kShareFloats; i += 4) {
      s_to[i / 4 * 128] = make_float4(r_dq[i], r_dq[i + 1], r_dq[i + 2], r_dq[i + 3]);
    }
    async_fence();
    named_barrier_arrive(kShareFull + warpgroup, kBackwardShareThreads);
  }

  // r = (the warpgroup's keys at s_keys) @ (kRows rows at s_rows)^T.
  __device__ __forceinline__ void scores(Scores& r, uint32_t s_keys, uint32_t s_rows) const {
    const FreshDescriptor a(s_keys + warpgroup * Config::kHalfStretch, 16), b(s_rows, 16);
    wgmma_forget(r);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kDimSlices; ++slice) {
      const int stretch = slice / 4, in_line = slice % 4 * 32;
      Wgmma<T, kRows>::template multiply<0, 0>(r, a.at(stretch * Config::kKeyStretch + in_line),
                                               b.at(stretch * Config::kRowStretch + in_line),
                                               slice > 0);
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
    wgmma_forget(r);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kKeySlices; ++slice) {
      Wgmma<T, Config::kShareRows>::template multiply<1, 0>(
          r, a.at(slice * 16 * kLine), b.at(slice / 4 * Config::kScoreHalf + slice % 4 * 32),
          slice > 0);
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void pack(Packed& to, const Scores& from) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      to[i / 4][i % 4] = pack_pair<T>(from[2 * i], from[2 * i + 1]);
    }
  }

  __device__ __forceinline__ bool capped() const {
    if constexpr (Config::kMasked) {
      return p.args.mask.softcap > 0.f;
    } else {
      return false;
    }
  }

  // S^T -> P^T
  __device__ __forceinline__ void exponentiate(Scores& r, const Place& at) const {
    const float* s_lse = s.lse[at.stage] + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(s_lse + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = r[n * 4 + i];
        x = exponential<T>(fmaf(x, p.args.score_factor, i % 2 ? lse.y : lse.x));
      }
    }
  }

  // The same behind a cap: P goes to `to`, and P times its slope, 1 - tanh^2, stays in r.
  __device__ __forceinline__ void exponentiate_capped(Scores& r, Packed& to, const Place& at,
                                                      int tile) const {
    if constexpr (Config::kMasked) {
      const float factor = p.args.mask.softcap * p.args.score_factor;
      const float* s_lse = s.lse[at.stage] + lane() % 4 * 2;
      const int key = first_key() + warp() * 16 + lane() / 4;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(s_lse + n * 8);
        const int4 live = live_of(at, n);
        float slope[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = r[n * 4 + i];
          const float capped = tanh_of</*kExact=*/false>(x * p.args.cap);
          x = exponential<T>(fmaf(capped, factor, i % 2 ? lse.y : lse.x));
          if (!sees(live, i, key)) x = 0.f;
          slope[i] = fmaf(-capped, capped, 1.f);
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          float* x = r + n * 4 + i;
          to[n / 2][n % 2 * 2 + i / 2] = pack_pair<T>(x[0], x[1]);
          x[0] = x[0] == 0.f ? 0.f : x[0] * slope[i];
          x[1] = x[1] == 0.f ? 0.f : x[1] * slope[i + 1];
        }
      }
    }
  }

  // True where some pair of the warpgroup's keys and a tile's rows is hidden.
  __device__ __forceinline__ bool is_edge(const Place& at, int tile) const {
    const int first = first_key(), end = first + 64;
    if constexpr (Config::kMasked) {
      const RowGroup& group = s.seen[at.stage].group;
      return first < group.last_begin || end > group.first_end;
    } else {
      const int first_row = tile * kRows;
      return first_row < s.work.span.first_row || first_row + kRows > seqlen_q() ||
             first < s.work.span.pad || end > seqlen_k() ||
             (p.args.rule.causal && end > static_cast<int>(p.args.rule.position(first_row)) + 1);
    }
  }

  // What the two rows of a lane among rows 8 n to 8 n + 7 see, and whether register i of theirs
  // is of a key that is seen.
  __device__ __forceinline__ int4 live_of(const Place& at, int n) const {
    return *reinterpret_cast<const int4*>(&s.seen[at.stage].live[n * 8 + lane() % 4 * 2]);
  }
  static __device__ __forceinline__ bool sees(const int4& live, int i, int key) {
    const int at = key + i / 2 * 8;
    return i % 2 ? at >= live.z && at < live.w : at >= live.x && at < live.y;
  }

  // P is 0 where a row doesn't see a key.
  __device__ __forceinline__ void hide(Scores& r_p, const Place& at, int tile) const {
    const int first_key = this->first_key() + warp() * 16 + lane() / 4;
    if constexpr (Config::kMasked) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const int4 live = live_of(at, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!sees(live, i, first_key)) r_p[n * 4 + i] = 0.f;
        }
      }
    } else {
      const int row = tile * kRows + lane() % 4 * 2, end = seqlen_q() - row;
      int begin[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first_key + i * 8;
        int first = s.work.span.first_row;
        if (p.args.rule.causal) first = max(first, key - (seqlen_k() - seqlen_q()));
        if (key < s.work.span.pad || key >= seqlen_k()) first = seqlen_q();
        begin[i] = first - row;
      }
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int in_tile = i / 4 * 8 + i % 2;
        if (in_tile < begin[i / 2 % 2] || in_tile >= end) r_p[i] = 0.f;
      }
    }
  }

  // Zeroes the lines of a tile for which clears(line) is true. By both warpgroups.
  template <int kStretch, typename Clears>
  static __device__ __forceinline__ void clear_lines(char* s_tile, int lines,
                                                     const Clears& clears) {
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < lines * 8; i += kBackwardConsumers) {
      if (!clears(i / 8)) continue;
#pragma unroll
      for (int line = 0; line < Config::kLines; ++line) {
        *reinterpret_cast<uint4*>(s_tile + line * kStretch + i * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Rows that see nothing may hold NaN, which no zero of P or dS would hide.
  __device__ __forceinline__ void clear_rows(const Place& at, int tile) const {
    const auto clear = [&](int lines, const auto& clears) {
      s.dout_pipeline.wait(at);
      clear_lines<Config::kRowStretch>(s.q[at.stage], lines, clears);
      clear_lines<Config::kRowStretch>(s.dout[at.stage], lines, clears);
      async_fence();
      named_barrier_wait<kCleared, kBackwardConsumers>();
    };
    if constexpr (Config::kMasked) {
      const uint64_t live = s.seen[at.stage].group.live;
      if (live != ~uint64_t{0}) clear(kRows, [&](int row) { return !(live >> row & 1); });
    } else {
      const int count = s.work.span.first_row - tile * kRows;
      if (count > 0) clear(count, [](int) { return true; });
    }
  }

  // The same of keys that nobody sees, for dQ.
  __device__ __forceinline__ void clear_keys() const {
    const int begin = first_live() - s.work.first_key, end = end_live() - s.work.first_key;
    // What lies behind the last key arrived as zeros.
    if (begin <= 0 && (!Config::kMasked || end >= Config::kKeys)) return;
    clear_lines<Config::kKeyStretch>(s.k, Config::kKeys,
                                     [&](int key) { return key < begin || key >= end; });
    async_fence();
    named_barrier_wait<kCleared, kBackwardConsumers>();
  }

  // The warpgroup's sums through its lines of a tile of keys.
  __device__ __forceinline__ void store(const Sums& r, uint32_t s_keys, const TensorMap& map,
                                        float scale) const {
    const int in_tile = warpgroup * 64 + warp() * 16;
    const int key = s.work.first_key + in_tile + lane() / 4;
    const auto scale_of = [&](int key) {
      return key >= first_live() && (!Config::kMasked || key < end_live()) ? scale : 0.f;
    };
    const float low = scale_of(key), high = scale_of(key + 8);
    const auto scaled = [](float x, float by) { return by == 0.f ? 0.f : x * by; };
    const int line = in_tile + lane() % 16;
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      const float* x = r + n * 8;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = i % 2 ? high : low;
        words[i] = pack_pair<T>(scaled(x[2 * i], by), scaled(x[2 * i + 1], by));
      }
      const int piece = n % 4 * 2 + lane() / 16;
      store_matrix_4(
          s_keys + n / 4 * Config::kKeyStretch + line * kLine + (swizzled_piece(line, piece) << 4),
          words);
    }
    async_fence();
    named_barrier_wait(kOwn + warpgroup, 128);
    if (threadIdx.x % 128 == 0 && first_key() < seqlen_k()) {
#pragma unroll
      for (int i = 0; i < Config::kLines; ++i) {
        tma_store(map, s_keys + i * Config::kKeyStretch + warpgroup * Config::kHalfStretch,
                  i * Config::kLineElems, first_key(), s.work.head_kv, s.work.sequence);
      }
      tma_commit();
    }
  }
};
#endif

}  // namespace torchweld
