// The backward of attention on tensor cores of sm_80 and newer. The grid has one block per tile of
// keys.
//
//   P = exp(scale * Q K^T - lse)     dP = dO V^T      dS = P * (dP - delta), delta = sum(dO * O)
//   dV = P^T dO                      dK = scale * dS^T Q        dQ = scale * dS K
//
// Every warp has a strip of the keys. It computes S^T and dP^T of the strip, so that P^T and dS^T
// are already in its registers as the left operands of dV and dK. Only dS goes through shared
// memory, as an operand of dQ. Blocks add to dQ in a fixed order (attention/sync/bwd_dq.cuh).
//
// A block loops over the query heads of its kv head. For each query head, the block loops over the
// query tiles whose rows see the block's keys, from the last tile to the first. While a block
// computes a query tile, it loads the next one. In fp32, the threads of the block split each value
// of a tile into bf16 terms once, and all warps read these terms (attention/sync/terms.cuh).
//
// Blocks draw tickets in ascending order of their key tiles. Therefore a block waits only for
// blocks that have already started, and the longest blocks start first under `causal`. All blocks
// of a head start with the last query rows. Therefore no block waits for a block that is still at
// the diagonal.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2. The fixed order of dQ is new.
#pragma once

#include "attention/sync/bwd_paired.cuh"
#include "core/launch.h"

namespace torchweld {

// Computes dV, dK and dQ for the tile of keys of one block.
template <typename Config>
struct BackwardBlock : BackwardTools<Config> {
  using Base = BackwardTools<Config>;
  using Base::args, Base::handles_non_finite, Base::work, Base::kCols, Base::kDimTiles, Base::kRows,
      Base::kScoreTiles, Base::kStrips, Base::buffer_of, Base::s_right, Base::s_mn, Base::dq,
      Base::shared;
  using typename Base::HeldScores;
  using typename Base::Ops;
  using typename Base::QTile;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::T;

  float r_dk[kStrips][Config::kKey ? kDimTiles : 1][4] = {};
  float r_dv[kStrips][Config::kValue ? kDimTiles : 1][4] = {};

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (work().first_head < work().end_head) {
      this->load_keys();
      loop_tiles();
    }
    const AttentionBackwardParams& p = args.params;
    if constexpr (Config::kMasked) {
      if constexpr (Config::kKey) this->clear_unseen(r_dk);
      if constexpr (Config::kValue) this->clear_unseen(r_dv);
    }
    if constexpr (Config::kKey) this->store(r_dk, p.scale, p.dkey, p.sizes.head_dim);
    if constexpr (Config::kValue) {
      this->store(r_dv, 1.f / (1 << kProbabilityShift<T>), p.dvalue, p.sizes.head_dim_v);
    }
  }

 private:
  __device__ __forceinline__ void loop_tiles() {
    const typename Config::WorkTile& work = shared.work;
    QueryTile tile = {work.first_head, work.last_tile};
    this->load_rows(tile, 0);
    int stage = 0;
    while (true) {
      const QueryTile next = this->tile_after(tile);
      // After this barrier, no warp still reads Q and dO of the previous tile, and dS of the
      // previous tile is complete.
      copy_async_wait<0>();
      __syncthreads();
      bool non_finite = this->non_finite_keys;
      if constexpr (Config::kSplit) {
        non_finite |= split_tile<Config::kThreads>(shared.q[0], shared.next_q);
        non_finite |= split_tile<Config::kThreads>(shared.dout[0], shared.next_dout);
      }
      if (next.head < work.end_head) this->load_rows(next, 1 - stage);
      if constexpr (Config::kKey) {
        if (tile.index < work.last_tile || tile.head > work.first_head) {
          this->add_dq(this->tile_before(tile), 1 - stage);
        }
      }
      if constexpr (Config::kSplit) handles_non_finite = __syncthreads_or(non_finite);
      compute(tile, stage);
      if (next.head == work.end_head) break;
      tile = next;
      stage = 1 - stage;
    }
    if constexpr (Config::kKey) {
      __syncthreads();
      this->add_dq(tile, stage);
      this->signal_dq(tile);
    }
  }

  __device__ __forceinline__ void compute(const QueryTile& tile, int stage) {
    const int first_row = tile.index * kRows;
    const bool all_visible = this->all_visible(first_row);
#pragma unroll 1
    for (int col = 0; col < kRows; col += kCols) {
      Scores r_p = {}, r_ds = {};
      const int rows_byte =
          buffer_of(stage) * static_cast<int>(sizeof(QTile)) + col * QTile::kRowBytes;
      this->multiply(r_p, offsetof(Shared, k), s_right + rows_byte, offsetof(Shared, q));
      if constexpr (Config::kKey) {
        this->multiply(r_ds, offsetof(Shared, v), s_right + rows_byte, offsetof(Shared, dout));
        if (col == 0) this->signal_dq(this->tile_before(tile));
      }
      differentiate(r_p, r_ds, stage, col);
      if (!all_visible) {
        if constexpr (Config::kMasked) {
          this->hide_masked(first_row + col, r_p, r_ds);
        } else {
          this->hide(first_row + col, r_p, r_ds);
        }
      }
      HeldScores r_held_p, r_held_ds;
      this->hold(r_held_p, r_p);
      this->hold(r_held_ds, r_ds);
      if constexpr (Config::kKey) {
        if (this->group() == 0) this->store_scores(shared.ds[buffer_of(stage)], r_held_ds, col);
        if (col + kCols == kRows) dq.prefetch(args, tile, this->dq_order_of(tile));
      }
      if constexpr (Config::kValue) {
        accumulate(r_dv, r_held_p, s_mn + rows_byte, offsetof(Shared, dout));
      }
      if constexpr (Config::kKey) {
        accumulate(r_dk, r_held_ds, s_mn + rows_byte, offsetof(Shared, q));
      }
    }
  }

  // Converts the scores in r_p into P * 2^kProbabilityShift, and dP in r_ds into dS. shared.delta
  // holds delta * 2^-kProbabilityShift. kUnshift multiplies dP by 2^-kProbabilityShift, too.
  __device__ __forceinline__ void differentiate(Scores& r_p, Scores& r_ds, int stage, int col) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const int first = col + threadIdx.x % 4 * 2;
    if constexpr (Config::kMasked) {
      if (args.params.mask.softcap > 0.f) return differentiate_capped(r_p, r_ds, stage, first);
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][first + n * 8]);
      float2 delta = {};
      if constexpr (Config::kKey) {
        delta = *reinterpret_cast<const float2*>(&shared.delta[stage][first + n * 8]);
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = r_p[i][n][j];
          p = exponential<T>(exponent_of<T>(p, args.score_factor, j % 2 ? lse.y : lse.x));
          r_ds[i][n][j] = p * fmaf(r_ds[i][n][j], kUnshift, -(j % 2 ? delta.y : delta.x));
        }
      }
    }
  }

  // The version of differentiate() for soft-capped scores. The function also multiplies dS by the
  // slope of the cap, 1 - tanh^2.
  __device__ __forceinline__ void differentiate_capped(Scores& r_p, Scores& r_ds, int stage,
                                                       int first) {
    constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
    const float factor = args.params.mask.softcap * args.score_factor;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][first + n * 8]);
      float2 delta = {};
      if constexpr (Config::kKey) {
        delta = *reinterpret_cast<const float2*>(&shared.delta[stage][first + n * 8]);
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = r_p[i][n][j];
          const float capped = tanh_of<sizeof(T) == 4>(p * args.cap);
          p = exponential<T>(fmaf(capped, factor, j % 2 ? lse.y : lse.x));
          const float dp = fmaf(r_ds[i][n][j], kUnshift, -(j % 2 ? delta.y : delta.x));
          r_ds[i][n][j] = p * dp * fmaf(-capped, capped, 1.f);
        }
      }
    }
  }

  // Computes r_sum += r_scores @ B. r_scores holds P^T or dS^T of the warp's strips, for kCols
  // query rows. B holds these kCols rows of dO or Q, in the tile at byte `rows` of shared memory.
  __device__ __forceinline__ void accumulate(float (&r_sum)[kStrips][kDimTiles][4],
                                             const HeldScores& r_scores, uint32_t s_rows,
                                             int rows) {
#pragma unroll
    for (int k = 0; k < kCols; k += Ops::kDepth) {
      typename Ops::Left a[kStrips];
#pragma unroll
      for (int i = 0; i < kStrips; ++i) Ops::from_results(a[i], &r_scores[i][k / 8]);
      Ops::template multiply<kDimTiles / Ops::kMnTiles, Ops::kMnTiles>(
          a, handles_non_finite,
          [&](typename Ops::Right(&b)[Ops::kMnTiles], int n) {
            Ops::template load_mn_right<QTile>(b, s_rows, rows + k * QTile::kRowBytes, n);
          },
          [&](int i, int n) -> float (&)[4] { return r_sum[i][n]; });
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(
    Config::kThreads,
    Config::kShape.blocks_per_sm) void attention_backward_kernel(const __grid_constant__
                                                                 typename Config::Args args,
                                                                 unsigned* g_ticket) {
  extern __shared__ __align__(128) unsigned char s_raw[];
  BackwardShared<Config>& shared = *reinterpret_cast<BackwardShared<Config>*>(s_raw);
  if (threadIdx.x == 0) shared.work.template get_work<Config>(args, g_ticket);
  __syncthreads();
  using Block =
      std::conditional_t<Config::kPaired, PairedBackwardBlock<Config>, BackwardBlock<Config>>;
  Block(args, shared).run();
}

template <typename Config>
void launch_backward_part(const typename Config::Args& args, unsigned* g_ticket,
                          cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t key_blocks = (sizes.seqlen_k + Config::kKeys - 1) / Config::kKeys;
  const int64_t blocks = sizes.batch * sizes.nheads_kv * key_blocks;
  const auto kernel = attention_backward_kernel<Config>;
  constexpr int kBytes = sizeof(BackwardShared<Config>);
  static_assert(kBytes <= Config::kShape.shared_bytes());
  launch_kernel(kernel, {blocks, Config::kThreads, kBytes}, stream, args, g_ticket);
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_tile(const Args& args, cudaStream_t stream) {
  using Part = BackwardPart;
  constexpr bool kMasked = kIsMasked<Args>;
  unsigned* const g_ticket = args.g_tickets;
  if constexpr (kAttentionBackwardTiles[kTile].split) {
    launch_backward_part<BackwardConfig<T, kTile, Part::kValue, kMasked>>(args, g_ticket, stream);
    launch_backward_part<BackwardConfig<T, kTile, Part::kKey, kMasked>>(args, g_ticket + 1, stream);
  } else {
    launch_backward_part<BackwardConfig<T, kTile, Part::kBoth, kMasked>>(args, g_ticket, stream);
  }
}

}  // namespace torchweld
