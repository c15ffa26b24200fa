// What a consumer warpgroup of attention's gradient on Hopper knows of its scores: which keys and
// rows they are of, what hides them, and how they become probabilities.
#pragma once

#include "attention/cap.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "device/features.cuh"
#include "device/sm90/registers.cuh"
#include "device/sm90/stmatrix.cuh"

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

// The scores are those of 64 keys and of the kScoreRows rows from first_row() on.
template <typename Config>
struct BackwardSm90Scores {
  using T = typename Config::T;
  using Params = typename Config::Params;
  using Shared = typename Config::Shared;
  using Place = PipelineState<Config::kStages>;
  static constexpr int kRows = Config::kRows, kScoreRows = Config::kScoreRows;
  static constexpr int kRowSlices = kScoreRows / 16;
  static constexpr int kLine = kSwizzleRowBytes;
  using Scores = float[kScoreRows / 2];
  using Packed = uint32_t[kRowSlices][4];

  const Params& p;
  Shared& s;
  const int warpgroup;

  __device__ __forceinline__ BackwardSm90Scores(const Params& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ int first_key() const { return Config::first_key(s.work, warpgroup); }
  __device__ __forceinline__ int first_row() const { return Config::first_row(warpgroup); }
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

  // A warp that is done with a stage.
  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(s_empty);
  }

  // Where a walk is.
  // NOTE: in registers. A load between the products waits long: they keep shared memory busy.
  struct Walk {
    int tile, left;  // steps of the tile, with this one
    int first_tile, last_tile, tile_steps, direction;
    int first_row, first_whole;  // rows before them see no key, or not all; not under a mask

    __device__ __forceinline__ void advance() {
      if (--left == 0) {
        left = tile_steps;
        tile += direction;
      }
      if (tile < first_tile) tile = last_tile;
    }
  };
  __device__ __forceinline__ Walk begin_walk() const {
    const auto& work = s.work;
    Walk walk = {work.start_tile(),
                 work.tile_steps,
                 work.first_tile,
                 work.last_tile,
                 work.tile_steps,
                 work.direction,
                 0,
                 0};
    if constexpr (!Config::kMasked) {
      const int first = first_key(), end = first + 64;
      walk.first_row = walk.first_whole = work.span.first_row;
      if (p.args.rule.causal) {
        walk.first_whole = max(walk.first_whole, end - 1 - (seqlen_k() - seqlen_q()));
      }
      if (first < work.span.pad || end > seqlen_k()) walk.first_whole = INT_MAX;
    }
    return walk;
  }

  static __device__ __forceinline__ void pack(Packed& to, const Scores& from) {
#pragma unroll
    for (int i = 0; i < kScoreRows / 4; ++i) {
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

  // Of a lane's rows, two of every eight.
  using RowStats = float2[kScoreRows / 8];
  __device__ __forceinline__ void load_stats(RowStats& r, const float* s_stats) const {
    const float* s_from = s_stats + first_row() + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      r[n] = *reinterpret_cast<const float2*>(s_from + n * 8);
    }
  }

  // S^T -> P^T
  __device__ __forceinline__ void exponentiate(Scores& r, const RowStats& lse) const {
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) {
      r[i] = exponential<T>(fmaf(r[i], p.args.score_factor, i % 2 ? lse[i / 4].y : lse[i / 4].x));
    }
  }

  // The same behind a cap: P goes to `to`, and P times its slope, 1 - tanh^2, stays in r.
  __device__ __forceinline__ void exponentiate_capped(Scores& r, Packed& to, const Place& at,
                                                      bool is_edge) const {
    if constexpr (Config::kMasked) {
      cap_scores</*kExact=*/false>(r, p.args.cap);
      is_edge ? exponentiate_tanh<true>(r, to, at) : exponentiate_tanh<false>(r, to, at);
    }
  }
  template <bool kHides>
  __device__ __forceinline__ void exponentiate_tanh(Scores& r, Packed& to, const Place& at) const {
    const float factor = p.args.mask.softcap * p.args.score_factor;
    const float* s_lse = s.lse[at.stage] + first_row() + lane() % 4 * 2;
    const int key = first_key() + warp() * 16 + lane() / 4;
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(s_lse + n * 8);
      int4 live;
      if constexpr (kHides) live = live_of(at, n);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float* x = r + n * 4 + i;
        float probability[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          probability[j] = exponential<T>(fmaf(x[j], factor, j ? lse.y : lse.x));
          const float sloped = probability[j] * fmaf(-x[j], x[j], 1.f);
          const bool hidden = kHides && !sees(live, i + j, key);
          if (hidden) probability[j] = 0.f;
          x[j] = hidden ? 0.f : sloped;
        }
        to[n / 2][n % 2 * 2 + i / 2] = pack_pair<T>(probability[0], probability[1]);
      }
    }
  }

  // True where some pair of the warpgroup's keys and a tile's rows is hidden.
  __device__ __forceinline__ bool is_edge(const Place& at, const Walk& walk) const {
    if constexpr (Config::kMasked) {
      const int first = first_key(), end = first + 64;
      const RowGroup& group = s.seen[at.stage].group;
      return first < group.last_begin || end > group.first_end;
    } else {
      const int first_row = walk.tile * kRows;
      return first_row < walk.first_whole || first_row + kRows > seqlen_q();
    }
  }

  // What the two rows of a lane among rows 8 n to 8 n + 7 see, and whether register i of theirs
  // is of a key that is seen.
  __device__ __forceinline__ int4 live_of(const Place& at, int n) const {
    return *reinterpret_cast<const int4*>(
        &s.seen[at.stage].live[first_row() + n * 8 + lane() % 4 * 2]);
  }
  static __device__ __forceinline__ bool sees(const int4& live, int i, int key) {
    const int at = key + i / 2 * 8;
    return i % 2 ? at >= live.z && at < live.w : at >= live.x && at < live.y;
  }

  // r = -delta of every score's row, with which dP^T begins. Unscaled, as dO is.
  __device__ __forceinline__ void begin_differences(Scores& r, const float* s_delta) const {
    constexpr float kScale = -(1 << kProbabilityShift<T>);
    RowStats delta;
    load_stats(delta, s_delta);
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) {
      r[i] = kScale * (i % 2 ? delta[i / 4].y : delta[i / 4].x);
    }
  }

  // P^T in r_p, dP^T - delta in r_dp -> dS^T there
  static __device__ __forceinline__ void differentiate(const Scores& r_p, Scores& r_dp,
                                                       bool is_edge) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) r_dp[i] = r_p[i] * (r_dp[i] * kUnshift);
    if (is_edge) {
      // What is hidden has P = 0, and its dP and delta may be NaN.
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) r_dp[i] = r_p[i] == 0.f ? 0.f : r_dp[i];
    }
  }

  // P is 0 where a row doesn't see a key.
  __device__ __forceinline__ void hide(Scores& r_p, const Place& at, int tile) const {
    const int first_key = this->first_key() + warp() * 16 + lane() / 4;
    if constexpr (Config::kMasked) {
#pragma unroll
      for (int n = 0; n < kScoreRows / 8; ++n) {
        const int4 live = live_of(at, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!sees(live, i, first_key)) r_p[n * 4 + i] = 0.f;
        }
      }
    } else {
      const int row = tile * kRows + first_row() + lane() % 4 * 2, end = seqlen_q() - row;
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
      for (int i = 0; i < kScoreRows / 2; ++i) {
        const int in_tile = i / 4 * 8 + i % 2;
        if (in_tile < begin[i / 2 % 2] || in_tile >= end) r_p[i] = 0.f;
      }
    }
  }

  // Zeroes the lines of a tile for which clears(line) is true. By both warpgroups.
  template <int kLines, int kStretch, typename Clears>
  static __device__ __forceinline__ void clear_lines(char* s_tile, int lines,
                                                     const Clears& clears) {
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < lines * 8; i += kBackwardConsumers) {
      if (!clears(i / 8)) continue;
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        *reinterpret_cast<uint4*>(s_tile + line * kStretch + i * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Rows that see nothing may hold NaN, which no zero of P or dS would hide.
  template <typename DoutPlace>
  __device__ __forceinline__ void clear_rows(const Place& at, const DoutPlace& dout_at,
                                             const Walk& walk) const {
    const auto clear = [&](int lines, const auto& clears) {
      s.dout_pipeline.wait(dout_at);
      clear_lines<Config::kLines, Config::kRowStretch>(s.q[at.stage], lines, clears);
      clear_lines<Config::kValueLines, Config::kRowStretch>(s.dout[dout_at.stage], lines, clears);
      async_fence();
      named_barrier_wait<kCleared, kBackwardConsumers>();
    };
    if constexpr (Config::kMasked) {
      const uint64_t live = s.seen[at.stage].group.live;
      if (live != ~uint64_t{0}) clear(kRows, [&](int row) { return !(live >> row & 1); });
    } else {
      const int count = walk.first_row - walk.tile * kRows;
      if (count > 0) clear(count, [](int) { return true; });
    }
  }

  // The warpgroup's sums of some columns of dV or dK, from line `first_line` of the tensor on,
  // through lines of a tile of keys, where its keys start at `in_tile`. s_keys: where those columns
  // lie there.
  template <bool kOfDv, int kSums>
  __device__ __forceinline__ void store(const float (&r)[kSums], uint32_t s_keys, int in_tile,
                                        int first_line, const TensorMap& map, float scale) const {
    const int key = first_key() + warp() * 16 + lane() / 4;
    const auto scale_of = [&](int key) {
      return key >= first_live() && (!Config::kMasked || key < end_live()) ? scale : 0.f;
    };
    const float low = scale_of(key), high = scale_of(key + 8);
    const auto scaled = [](float x, float by) { return by == 0.f ? 0.f : x * by; };
    if (p.args.group_parts > 1) {
      float4* const g_to = p.args.part_sums(s.work.part, first_key() / 64, kOfDv, Config::kDim) +
                           first_line * 8 * 128;
#pragma unroll
      for (int n = 0; n < kSums / 4; ++n) {
        const float* x = r + n * 4;
        g_to[n * 128 + threadIdx.x % 128] = make_float4(scaled(x[0], low), scaled(x[1], low),
                                                        scaled(x[2], high), scaled(x[3], high));
      }
      return;
    }
    const int line = in_tile + warp() * 16 + lane() % 16;
#pragma unroll
    for (int n = 0; n < kSums / 8; ++n) {
      const float* x = r + n * 8;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = i % 2 ? high : low;
        words[i] = pack_pair<T>(scaled(x[2 * i], by), scaled(x[2 * i + 1], by));
      }
      const int piece = n % 4 * 2 + lane() / 16;
      store_matrix_4(
          s_keys + n / 4 * Config::kKeyStretch + line * kLine + (swizzled_chunk(line, piece) << 4),
          words);
    }
    async_fence();
    named_barrier_wait(kOwn + warpgroup, 128);
    if (threadIdx.x % 128 == 0 && first_key() < seqlen_k()) {
#pragma unroll
      for (int i = 0; i < kSums / 32; ++i) {
        tma_store(map, s_keys + i * Config::kKeyStretch + in_tile * kLine,
                  (first_line + i) * Config::kLineElems, first_key(), s.work.head_kv,
                  s.work.sequence);
      }
      tma_commit();
    }
  }
};
#endif

}  // namespace torchweld
