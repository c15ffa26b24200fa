// The forward of attention for few query rows in the batch-invariant mode. A row gets the bits that
// Hopper's kernel (attention/sm90) gives it in a sequence of any length: its keys are taken in the
// same steps, and every element of O is one chain of additions along the keys. The chain cannot be
// split, so two kernels divide the work otherwise.
//
// attention_chain_scores_kernel has one block per step. The block computes S = Q K^T of the step
// and publishes the maxima of the step's rows. A row's probabilities need its maximum over all keys
// up to the step, so the block then waits for the maxima of the earlier steps. It stores P, rounded
// to 16 bits, and the factors by which O is rescaled.
//
// attention_chain_values_kernel has one block per 16 columns of V. One of its warps loads, and the
// other one computes O of the columns step by step: O = O * factor + P V. mma.sync and wgmma give
// the same bits if the k16 steps of a chain are the same. The kernel starts when the last blocks of
// the first kernel run, and waits for each step (BlockFlags).
//
// The chain is bound by the latency of mma.sync, about 50 cycles per 16 keys with the loads of a
// step. H200, (batch, heads, kv heads, keys, head dim), times of the wgmma tiles in parentheses:
// (1, 32, 8, 4096, 128) takes 22 us (43), (1, 32, 8, 32768, 128) 126 us (275), (8, 32, 8, 4096,
// 128) 68 us (49). What did not help:
//   The scores kernel prefetches V to L2, and the other kernel has 12 stages: 119 us instead of 126
//   with 32,768 keys, 25 instead of 22 with 4,096.
//   Resident blocks draw the steps of the scores: 141 us instead of 126.
#pragma once

#include "attention/decode/chain_scores.cuh"
#include "attention/decode/chain_values.cuh"
#include "attention/fwd.h"
#include "core/launch.h"
#include "device/dispatch.cuh"

namespace torchweld {

template <typename T, int kDim, int kKeys, bool kLazy>
void launch_attention_chain_steps(const AttentionParams& p, cudaStream_t stream) {
  using Scores = ChainScoresConfig<T, kDim, kKeys, kLazy>;
  using Values = ChainValuesConfig<T, kKeys>;
  using Memory = typename Values::Memory;
  static_assert(sizeof(typename Memory::Step) == attention_chain_step_bytes(kKeys));
  const int steps = p.choice.splits;
  const int columns = attention_chain_columns(p.sizes.head_dim_v);
  const ScoreScale scale(p.scale);
  DecodePlan plan = DecodePlan::make(p);
  const int64_t groups = plan.blocks(p.sizes.batch) / steps;
  auto* const all_steps = reinterpret_cast<typename Memory::Step*>(p.partials);
  const Memory memory = {all_steps,
                         reinterpret_cast<float2*>(all_steps + groups * steps),
                         p.flags,
                         static_cast<uint32_t>(plan.flags.number) | 1u,
                         {p.flags + groups * steps * AttentionDecodeTile::kRows, plan.flags.number},
                         steps,
                         columns};
  Grid grid(groups * steps, Scores::kThreads, int(sizeof(typename Scores::Shared)));
  grid.overlaps = true;
  launch_kernel(attention_chain_scores_kernel<Scores>, grid, stream, p, scale, plan, memory);
  plan.splits = FastDivisor(columns);
  Grid values_grid(groups * columns, Values::kThreads, int(sizeof(typename Values::Shared)));
  values_grid.overlaps = true;
  launch_kernel(attention_chain_values_kernel<Values>, values_grid, stream, p, scale, plan, memory);
}

template <typename T>
void launch_attention_chain(const AttentionParams& p, cudaStream_t stream) {
  dispatch_index<kNumAttentionSm90Tiles>(p.choice.tile, [&](auto index) {
    constexpr AttentionSm90Tile kTile = kAttentionSm90Tiles[index.value];
    // A row of a tile in shared memory has a power of two as its number of bytes.
    constexpr int kDim = kTile.dim <= 64 ? 64 : kTile.dim <= 128 ? 128 : 256;
    if constexpr (attention_sm90_is_fastest(index.value)) {
      launch_attention_chain_steps<T, kDim, kTile.masked_keys(), (kTile.dim_v > 128)>(p, stream);
    }
  });
}

}  // namespace torchweld
