// The scratch memory of attention's backward, and the arguments of its kernels.
#pragma once

#include <cmath>

#include "attention/bwd_args.cuh"
#include "attention/sync/bwd_parts.cuh"
#include "core/device.h"
#include "core/index.h"
#include "device/reduce.cuh"

namespace torchweld {

// The number of query heads that share a kv head.
inline int64_t backward_heads_per_kv_head(const AttentionSizes& sizes) {
  return sizes.nheads_kv > 0 ? sizes.nheads / sizes.nheads_kv : 0;
}

// The number of keys of a work tile, or 0 if the kernels have no work tiles.
inline int backward_keys_of_tile(const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kSm90) {
    const AttentionBackwardSm90Tile& tile = kAttentionBackwardSm90Tiles[choice.tile];
    return tile.keys * tile.blocks;
  }
  if (choice.engine == AttentionEngine::kWide) return AttentionWideTile::kRows;
  return choice.engine == AttentionEngine::kSync ? kAttentionBackwardTiles[choice.tile].keys : 0;
}

// Whether the kernels need MaskedBackwardArgs.
inline bool backward_needs_mask(const AttentionBackwardParams& params) {
  return params.mask.is_general() || params.choice.engine == AttentionEngine::kWide;
}

// The number of key tiles of a sequence for which a general mask needs a KeyTileMask.
inline int64_t backward_key_tiles(const AttentionBackwardParams& params) {
  const int keys = backward_keys_of_tile(params.choice);
  return keys > 0 && backward_needs_mask(params) ? divide_up(params.sizes.seqlen_k, keys) : 0;
}

// The division of a launch into blocks, and the layout of the scratch memory. The fields `lse` to
// `parts` are offsets of arrays, in floats. Only general masks use `groups`, `live` and
// `key_tiles`.
struct BackwardScratch {
  int64_t wave = 0;  // number of blocks or clusters that run at once on Hopper, else 0
  int64_t group_parts = 1;
  int64_t rows;
  int64_t all_rows;  // batch * nheads * rows
  int64_t lse, delta, dq, tickets, groups, live, key_tiles, parts, bytes;

  explicit BackwardScratch(const AttentionBackwardParams& params) {
    const AttentionSizes& sizes = params.sizes;
    const AttentionChoice& choice = params.choice;
    const int64_t kv_heads = sizes.batch * sizes.nheads_kv;
    if (choice.engine == AttentionEngine::kSm90) {
      wave = device_facts().sms / kAttentionBackwardSm90Tiles[choice.tile].blocks;
      group_parts =
          attention_backward_group_parts(kv_heads, backward_heads_per_kv_head(sizes),
                                         sizes.seqlen_q, sizes.seqlen_k, wave, params.mask.causal);
    }
    const int64_t pad = attention_backward_row_pad(choice);
    const int64_t columns =
        attention_backward_scratch_columns(choice, sizes.head_dim, sizes.head_dim_v);
    rows = divide_up(sizes.seqlen_q, pad) * pad;
    all_rows = sizes.batch * sizes.nheads * rows;
    const bool has_stat_slice = choice.engine == AttentionEngine::kSm90 &&
                                kAttentionBackwardSm90Tiles[choice.tile].has_stat_slice(
                                    params.mask.is_general(), params.mask.softcap > 0.f,
                                    params.mask.dropout.given() || params.mask.bias.given());
    constexpr int64_t kStatSliceFloats = AttentionBackwardSm90Tile::kStatSliceBytes / 4;
    lse = has_stat_slice ? kStatSliceFloats * all_rows : 0;
    delta = lse + all_rows;
    dq = delta + all_rows;
    tickets = dq + all_rows * columns;
    groups = tickets + counter_bytes() / 4;
    const int64_t mask_rows = backward_needs_mask(params) ? sizes.batch * rows : 0;
    constexpr int64_t kGroupFloats = sizeof(BlockMask) / 4, kRangeFloats = sizeof(KeyRange32) / 4;
    live = groups + mask_rows / kAttentionBackwardRowPad * kGroupFloats;
    key_tiles = live + mask_rows * kRangeFloats;
    constexpr int64_t kKeyTileFloats = sizeof(KeyTileMask) / 4;
    parts = key_tiles + sizes.batch * backward_key_tiles(params) * kKeyTileFloats;
    const int64_t keys = attention_backward_part_tiles(sizes.seqlen_k) * 64;
    bytes = (parts + (group_parts > 1 ? 2 * kv_heads * group_parts * keys * columns : 0)) * 4;
  }
  // The number of bytes of the ticket counters and of the dQ semaphores behind them.
  int64_t counter_bytes() const {
    return kBackwardTickets * 4 + all_rows / kAttentionBackwardRowsPerCounter * 4;
  }
};

inline BackwardArgs make_backward_args(const AttentionBackwardParams& params,
                                       const BackwardScratch& scratch) {
  const AttentionSizes& sizes = params.sizes;
  const bool base_2 = params.dtype != DType::kFloat32;
  const int64_t elem_size = base_2 ? 2 : 4;
  float* const g_scratch = static_cast<float*>(params.scratch);
  BackwardArgs args = {};
  args.params = params;
  args.rows = scratch.rows;
  // The number of query heads in the largest part of a group.
  const int64_t heads = divide_up(backward_heads_per_kv_head(sizes), scratch.group_parts);
  const int64_t dims = sizes.head_dim + sizes.head_dim_v;
  const AttentionBackwardLoad load = {
      sizes.batch * sizes.nheads_kv * scratch.group_parts, heads, sizes.seqlen_k,
      attention_backward_scratch_columns(params.choice, sizes.head_dim, sizes.head_dim_v),
      // The first term is the bytes of Q, dO and the fp32 sums of dQ. The second term is the bytes
      // of K and V.
      heads * sizes.seqlen_q * (dims * elem_size + sizes.head_dim * 4) +
          sizes.seqlen_k * dims * elem_size,
      args.params.mask.is_uneven() || params.mask.key_start};
  // The blocks of a wave take different times only under a plain causal mask. With a window or
  // packed documents, all blocks take about the same time.
  const bool triangle = params.mask.causal && params.mask.window == 0 && !params.mask.key_start &&
                        !params.mask.has_row_ends;
  const AttentionBackwardOrder order = attention_backward_order(load, triangle ? scratch.wave : 0);
  args.group_parts = static_cast<unsigned>(scratch.group_parts);
  args.parts_at_once = static_cast<unsigned>(order.at_once);
  args.wave = static_cast<unsigned>(order.wave);
  args.rounds_dq =
      params.choice.engine == AttentionEngine::kSm90 &&
      attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[params.choice.tile], load, order);
  args.lse_factor = base_2 ? kLog2e : 1.f;
  // NOTE: the stat slice holds lse / score_factor, so the factor must not be 0. A score times
  // kMinFactor is practically 0.
  constexpr float kMinFactor = 1e-30f;
  args.score_factor = base_2 ? params.scale * kLog2e : params.scale;
  if (std::fabs(args.score_factor) < kMinFactor) {
    args.score_factor = std::copysign(kMinFactor, args.score_factor);
  }
  args.shift = params.dtype == DType::kFloat16 ? kProbabilityShift<__half> : 0;
  args.g_lse = g_scratch + scratch.lse;
  args.g_stat_slice = static_cast<uint4*>(params.scratch);
  args.g_delta = g_scratch + scratch.delta;
  args.g_dq = g_scratch + scratch.dq;
  args.g_parts = reinterpret_cast<float4*>(g_scratch + scratch.parts);
  args.g_tickets = reinterpret_cast<unsigned*>(g_scratch + scratch.tickets);
  args.g_dq_semaphore = reinterpret_cast<int*>(args.g_tickets + kBackwardTickets);
  return args;
}

inline MaskedBackwardArgs make_masked_backward_args(const AttentionBackwardParams& params,
                                                    const BackwardScratch& scratch) {
  MaskedBackwardArgs args = {};
  static_cast<BackwardArgs&>(args) = make_backward_args(params, scratch);
  if (params.mask.softcap > 0.f) {
    args.cap = params.scale / params.mask.softcap;
    args.score_factor = args.lse_factor;
  }
  float* const g_scratch = static_cast<float*>(params.scratch);
  args.g_groups = reinterpret_cast<BlockMask*>(g_scratch + scratch.groups);
  args.g_live = reinterpret_cast<KeyRange32*>(g_scratch + scratch.live);
  args.g_key_tiles = reinterpret_cast<KeyTileMask*>(g_scratch + scratch.key_tiles);
  args.key_tiles = static_cast<int>(backward_key_tiles(params));
  args.key_tile_keys = backward_keys_of_tile(params.choice);
  return args;
}

}  // namespace torchweld
