// The backward of attention in 16 bits, for wide tiles: a warp has registers for the accumulators
// of only dV or only dK, not for both.
//
// Half of the warps are value warps: they compute P^T of a strip of keys and accumulate dV. The
// other warps are key warps: they compute dP^T of the same strips, read P from shared memory,
// compute dS^T, and accumulate dK. Therefore a warp can have twice as many keys as a warp that
// accumulates both dV and dK. Every fragment of Q and dO that a warp loads is an operand of twice
// as many mma instructions. This matters because shared memory, not the tensor cores, is the
// bottleneck. P^T and dS^T are left operands in registers. If several warps share a strip, each of
// these warps computes the scores of the strip for some of the query rows. It reads the scores for
// the other query rows from shared memory.
//
// Every warp adds its slice of dQ once per query tile. A key warp adds before it computes the next
// query tile. A value warp adds after it computes the next query tile. Therefore P is ready when a
// key warp needs P. While half of the warps wait for the sums of dQ, the other half multiply.
#pragma once

#include <cstddef>

#include "attention/sync/bwd_block.cuh"

namespace torchweld {

template <typename Config>
struct PairedBackwardBlock : BackwardTools<Config> {
  using Base = BackwardTools<Config>;
  using Base::args, Base::work, Base::kCols, Base::kDimTiles, Base::kGroups, Base::kRows,
      Base::kScoreTiles, Base::kStrips, Base::s_left, Base::s_right, Base::dq, Base::shared;
  using typename Base::HeldScores;
  using typename Base::KeyTile;
  using typename Base::Ops;
  using typename Base::QTile;
  using typename Base::Scores;
  using typename Base::ScoreTile;
  using typename Base::Shared;
  using typename Base::T;
  static constexpr int kStripWarps = Config::kStripWarps;
  // The first row of the last mma step. This warp holds scores for kCols rows, and an mma step
  // covers kDepth of these rows.
  static constexpr int kLastStep = kCols - Ops::kDepth;

  // Accumulators of dV in a value warp, or of dK in a key warp.
  float r_sum[kStrips][kDimTiles][4] = {};

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (work().first_head < work().end_head) {
      this->load_keys();
      loop_tiles();
    }
    const AttentionBackwardParams& p = args.params;
    if constexpr (Config::kMasked) this->clear_unseen(r_sum);
    if (sums_keys()) {
      this->store(r_sum, p.scale, p.dkey, p.sizes.head_dim);
    } else {
      this->store(r_sum, 1.f / (1 << kProbabilityShift<T>), p.dvalue, p.sizes.head_dim_v);
    }
  }

 private:
  // Whether this warp is a key warp.
  // NOTE: fresh_thread() makes the compiler recompute the result at every use. With a general mask
  // and several warps per strip, a Hopper kernel has no register left to keep the result.
  static __device__ __forceinline__ bool sums_keys() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Config::kMasked && kGroups > 1) return fresh_thread() / kWarp >= kStripWarps;
#endif
    return threadIdx.x / kWarp >= kStripWarps;
  }

  // Value warps compute P and dV, and key warps compute dS and dK. There is one barrier per query
  // tile. A value warp waits at the barrier of tile i, computes tile i and adds dQ of tile i - 1. A
  // key warp computes tile i, waits at the barrier of tile i + 1 and adds dQ of tile i.
  __device__ __forceinline__ void loop_tiles() {
    QueryTile tile = {work().first_head, work().last_tile};
    this->load_rows(tile, 0);
    int stage = 0;
    if (sums_keys()) load_and_wait(tile, stage);
    while (true) {
      if (!sums_keys()) load_and_wait(tile, stage);
      if (tile.head < work().end_head) {
        compute(tile, stage);
      } else {
        const QueryTile last = this->tile_before(tile);
        dq.prefetch(args, last, this->dq_order_of(last));
      }
      const QueryTile next = this->tile_after(tile);
      if (sums_keys()) load_and_wait(next, 1 - stage);
      const QueryTile done = dq_tile(tile);
      if (done.head >= work().first_head) {
        this->signal_dq(this->tile_before(done));
        this->add_dq(done, sums_keys() ? stage : 1 - stage);
      }
      if ((sums_keys() ? next.head : tile.head) == work().end_head) {
        this->signal_dq(done);
        return;
      }
      tile = next;
      stage = 1 - stage;
    }
  }

  // Returns the query tile to whose dQ this warp adds after it has computed `tile`.
  __device__ __forceinline__ QueryTile dq_tile(const QueryTile& tile) const {
    if (sums_keys()) return {tile.head, tile.index};
    return this->tile_before(tile);
  }

  // Waits until `tile` is loaded, and starts to load the tile after it. After the barrier, all
  // warps have finished the scores of the tile before `tile`, and dS of that earlier tile is
  // complete. No warp still reads dS of tiles before that earlier tile.
  __device__ __forceinline__ void load_and_wait(const QueryTile& tile, int stage) {
    copy_async_wait<0>();
    __syncthreads();
    if (tile.head == work().end_head) return;
    const QueryTile next = this->tile_after(tile);
    if (next.head < work().end_head) this->load_rows(next, 1 - stage);
  }

  __device__ __forceinline__ void compute(const QueryTile& tile, int stage) {
    const int first_row = tile.index * kRows;
    const int first_col = this->group() * kCols;
    Scores r_scores = {};
    {
      // NOTE: V follows K. With an address of its own for V, the kernel for a general mask spills.
      static_assert(offsetof(Shared, v) - offsetof(Shared, k) == sizeof(KeyTile));
      const uint32_t s_keys = shared_address(shared.k.s_data) + sums_keys() * sizeof(KeyTile);
      const auto& rows = sums_keys() ? shared.dout[stage] : shared.q[stage];
      const int thread = fresh_thread();
      s_left = left_lane<KeyTile>(s_keys, this->first_strip_row(), 0, thread);
      s_right = right_lane<QTile>(shared_address(rows.s_data), first_col, 0, thread);
      this->multiply(r_scores, 0, s_right, 0);
    }
    this->signal_dq(this->tile_before(dq_tile(tile)));
    if (sums_keys()) {
      wait_for_probabilities();
      differentiate(r_scores, stage, first_col);
    } else {
      if constexpr (Config::kMasked) {
        if (capped()) {
          exponentiate_capped(r_scores, stage, first_col);
        } else {
          exponentiate(r_scores, stage, first_col);
        }
      } else {
        exponentiate(r_scores, stage, first_col);
      }
    }
    if (!this->all_visible(first_row)) {
      if constexpr (Config::kMasked) {
        this->hide_masked(first_row + first_col, r_scores);
      } else {
        this->hide(first_row + first_col, r_scores);
      }
    }
    HeldScores r_held;
    this->hold(r_held, r_scores);
    ScoreTile& s_scores = sums_keys() ? shared.ds[stage] : shared.ds[2];
    this->store_scores(s_scores, r_held, first_col);
    signal();
    const auto& rows = sums_keys() ? shared.q[stage] : shared.dout[stage];
    accumulate(r_held, shared_address(s_scores.s_data),
               left_lane<QTile>(shared_address(rows.s_data), 0, this->first_col() / Ops::kDepth,
                                fresh_thread()),
               [&] {
                 const QueryTile next_dq = dq_tile(tile);
                 const bool there = next_dq.head >= work().first_head;
                 dq.prefetch(args, next_dq, there ? this->dq_order_of(next_dq) : 0);
               });
  }

  // Converts scores into P * 2^kProbabilityShift.
  __device__ __forceinline__ void exponentiate(Scores& r_p, int stage, int col) {
    const int first = col + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][first + n * 8]);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = r_p[i][n][j];
          p = exponential<T>(exponent_of<T>(p, args.score_factor, j % 2 ? lse.y : lse.x));
        }
      }
    }
  }

  __device__ __forceinline__ bool capped() const {
    if constexpr (Config::kMasked) {
      return args.params.mask.softcap > 0.f;
    } else {
      return false;
    }
  }

  // The version of exponentiate() for soft-capped scores. The function also computes P times the
  // slope of the cap, 1 - tanh^2, and stores it in the buffer of dS. A key warp computes dS of this
  // warp's strip and rows. It reads the product from the buffer and applies the mask.
  __device__ __forceinline__ void exponentiate_capped(Scores& r_p, int stage, int col) {
    const int first = col + threadIdx.x % 4 * 2;
    const float factor = args.params.mask.softcap * args.score_factor;
    HeldScores r_held;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][first + n * 8]);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        float scaled[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = r_p[i][n][j];
          const float capped = tanh_of</*kExact=*/false>(p * args.cap);
          p = exponential<T>(fmaf(capped, factor, j % 2 ? lse.y : lse.x));
          scaled[j] = p * fmaf(-capped, capped, 1.f);
        }
        r_held[i][n].set(scaled);
      }
    }
    this->store_scores(shared.ds[stage], r_held, col);
  }

  // Converts dP into dS. A value warp has computed P of this warp's strip and rows. It has stored
  // P, or P times the slope of the soft cap, in shared memory.
  __device__ __forceinline__ void differentiate(Scores& r_ds, int stage, int col) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const ScoreTile& s_p = shared.ds[capped() ? stage : 2];
    const uint32_t s_lane =
        ScoreTile::right_of(left_lane<ScoreTile>(shared_address(s_p.s_data),
                                                 this->first_strip_row(), 0, fresh_thread()),
                            col * static_cast<int>(sizeof(T)));
    const int first = col + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      float2 delta[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        delta[j] = *reinterpret_cast<const float2*>(&shared.delta[stage][first + (n + j) * 8]);
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        uint32_t r_p[4];
        load_matrix_4(r_p, ScoreTile::right_of(s_lane, n * 16) + i * 16 * ScoreTile::kRowBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 p = unpack_pair<T>(r_p[j]);
          float* ds = &r_ds[i][n + j / 2][j % 2 * 2];
          ds[0] = p.x * fmaf(ds[0], kUnshift, -delta[j / 2].x);
          ds[1] = p.y * fmaf(ds[1], kUnshift, -delta[j / 2].y);
        }
      }
    }
  }

  // Computes r_sum += S @ B. S is P^T or dS^T of the warp's strips, for all rows of the query tile.
  // B is the query tile of dO or Q at s_rows. r_scores holds S for kCols rows. The warp reads S for
  // the other rows from s_scores. The function calls late() as soon as registers of r_scores are
  // free again.
  template <typename Late>
  __device__ __forceinline__ void accumulate(const HeldScores& r_scores, uint32_t s_scores,
                                             uint32_t s_rows, const Late& late) {
    add_rows(s_rows, this->group(), [&](typename Ops::Left& a, int i, int row) {
      if (kGroups == 1 && i == 0 && row == kLastStep) late();
      Ops::from_results(a, &r_scores[i][row / 8]);
    });
    if (kGroups > 1) late();
    const uint32_t s_lane =
        left_lane<ScoreTile>(s_scores, this->first_strip_row(), 0, fresh_thread());
#pragma unroll
    for (int i = 1; i < kGroups; ++i) {
      const int group = (this->group() + i) % kGroups;
      wait_for(group);
      const uint32_t s_slice = ScoreTile::right_of(s_lane, group * kCols * sizeof(T));
      add_rows(s_rows, group, [&](typename Ops::Left& a, int strip, int row) {
        Ops::template load_left<ScoreTile>(
            a, ScoreTile::right_of(s_slice, row * sizeof(T)) + strip * 16 * ScoreTile::kRowBytes);
      });
    }
  }

  // Computes r_sum += S @ B over the kCols rows of one group. load(a, strip, row) loads a left
  // operand of S. B consists of the group's rows in the query tile at s_rows.
  template <typename Load>
  __device__ __forceinline__ void add_rows(uint32_t s_rows, int group, const Load& load) {
    const uint32_t s_slice = s_rows + group * kCols * QTile::kRowBytes;
#pragma unroll
    for (int row = 0; row < kCols; row += Ops::kDepth) {
      typename Ops::Left a[kStrips];
#pragma unroll
      for (int i = 0; i < kStrips; ++i) load(a[i], i, row);
      Ops::template multiply<kDimTiles / Ops::kMnTiles, Ops::kMnTiles>(
          a, false,
          [&](typename Ops::Right(&b)[Ops::kMnTiles], int n) {
            Ops::template load_mn_right<QTile>(b, s_slice, row * QTile::kRowBytes, n);
          },
          [&](int i, int n) -> float (&)[4] { return r_sum[i][n]; });
    }
  }

  // Returns the number of a named barrier. Each pair of a strip and a group of rows has two
  // barriers: one for "P is stored", and one for "dS is stored". Value warps of the strip wait
  // until P is stored, and key warps of the strip wait until dS is stored. One key warp has both
  // the strip and the group, and it waits until P is stored, too.
  __device__ __forceinline__ int barrier_of(bool ds, int group) const {
    return 1 + (ds ? kStripWarps : 0) + this->strip_warp() / kGroups * kGroups + group;
  }
  static __device__ __forceinline__ int barrier_threads(bool ds) {
    return kWarp * (ds ? kGroups : kGroups + 1);
  }
  __device__ __forceinline__ void signal() const {
    if (kGroups == 1 && sums_keys()) return;
    named_barrier_arrive(barrier_of(sums_keys(), this->group()), barrier_threads(sums_keys()));
  }
  __device__ __forceinline__ void wait_for(int group) const {
    named_barrier_wait(barrier_of(sums_keys(), group), barrier_threads(sums_keys()));
  }
  __device__ __forceinline__ void wait_for_probabilities() const {
    named_barrier_wait(barrier_of(false, this->group()), barrier_threads(false));
  }
};

}  // namespace torchweld
