// Defines BackwardWorkTile, the part of attention's backward that one block computes, and
// load_tile, which copies rows of a tensor into shared memory.
#pragma once

#include "attention/bwd_args.cuh"
#include "core/index.h"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// The work tile of a block. It stays in shared memory to save registers. Without a general mask,
// Span is SequenceSpan. Under a general mask, Span is KeyRange32, and `span` is the range of keys
// that the rows of the block's query tiles see.
template <typename Span>
struct alignas(8) BackwardWorkTile {
  int sequence;  // index of the sequence, or kNoWork if no work tile was left to draw
  int head_kv;
  int first_key;
  // The number of blocks that add to a dQ tile before this block. Under a general mask, dq_order is
  // the index of the key tile instead.
  int dq_order;
  Span span;
  int first_head;  // query heads [first_head, end_head), counted over all batch * nheads heads
  int end_head;
  int first_tile;  // query tiles [first_tile, last_tile] of each head
  int last_tile;
  // Only for Hopper's kernels: the number of consecutive loop steps that process the same query
  // tile. Each of these steps processes another query head.
  // NOTE: tile_steps is 1 if all blocks have the same query tiles. Otherwise, the blocks of later
  // keys have fewer query tiles, and tile_steps is the number of query heads. With tile_steps = 1,
  // the blocks of later keys would wait for the blocks of earlier keys at the end of every head.
  int tile_steps;
  int direction;   // only for Hopper: 1 if the loop visits query tiles in ascending order, else -1
  int first_step;  // persistent kernel only: number of loop steps in the CTA's earlier work tiles
  // The index of the block's part of the query heads, from 0 to
  // batch * nheads_kv * group_parts - 1.
  int part;

  static constexpr int kNoWork = -1;
  __device__ __forceinline__ bool is_end() const { return sequence == kNoWork; }

  // Only for Hopper's kernels: the number of loop steps, one for each query tile of each head.
  __device__ __forceinline__ int steps() const {
    return (end_head - first_head) * (last_tile - first_tile + 1);
  }
  // Returns the query tile with which the loop starts.
  __device__ __forceinline__ int start_tile() const {
    return direction > 0 ? first_tile : last_tile;
  }

  // Draws a ticket and fills the work tile. One thread calls this function. A part consists of some
  // query heads of one kv head. The parts run in sets of parts_at_once parts. In a set, the first
  // tickets are for key tile 0 of all parts, and the next tickets are for key tile 1 of all parts.
  template <typename Config>
  __device__ __forceinline__ void get_work(const typename Config::Args& args, unsigned* g_ticket) {
    const AttentionSizes& sizes = args.params.sizes;
    const unsigned key_tiles = (sizes.seqlen_k + Config::kKeys - 1) / Config::kKeys;
    const unsigned parts = args.group_parts, all_parts = sizes.batch * sizes.nheads_kv * parts;
    const unsigned ticket = atomicAdd(g_ticket, 1u);
    if (ticket >= all_parts * key_tiles) {
      sequence = kNoWork;
      return;
    }
    const unsigned before = ticket / (args.parts_at_once * key_tiles) * args.parts_at_once;
    const unsigned rest = ticket - before * key_tiles;
    const unsigned abreast = min(all_parts - before, args.parts_at_once);
    const int key_tile = static_cast<int>(rest / abreast);
    const int nheads_kv = static_cast<int>(sizes.nheads_kv);
    const unsigned group = static_cast<unsigned>(sizes.nheads) / nheads_kv;
    part = static_cast<int>(before + rest % abreast);
    if (kIsBiased<typename Config::Args> && args.params.mask.bias.is_shared()) {
      const unsigned batch = sizes.batch;
      part = static_cast<int>(part % batch * nheads_kv * parts + part / batch);
    }
    const int head = part / parts, part_of_head = part % parts;
    sequence = head / nheads_kv;
    head_kv = head % nheads_kv;
    first_key = key_tile * Config::kKeys;
    first_head = head * group + part_of_head * group / parts;
    end_head = head * group + (part_of_head + 1) * group / parts;
    tile_steps = args.params.mask.is_uneven() ? end_head - first_head : 1;
    direction = args.wave > 0 && rest / args.wave % 2 == 1 ? 1 : -1;
    last_tile = static_cast<int>(sizes.seqlen_q - 1) / Config::kRows;
    if constexpr (Config::kMasked) {
      constexpr int kGroupTiles = kAttentionBackwardRowPad / Config::kRows;
      const KeyTileMask mask = args.key_tile_of(sequence, key_tile);
      dq_order = key_tile;
      span = mask.keys;
      if (span.end == 0) end_head = first_head;
      first_tile = mask.first_group * kGroupTiles;
      last_tile = min(last_tile, (mask.last_group + 1) * kGroupTiles - 1);
    } else {
      span = SequenceSpan(args, sequence);
      dq_order = key_tile - span.pad / Config::kKeys;
      const int first_row = first_key + Config::kKeys > span.pad
                                ? span.first_row_seeing(args.params.mask, first_key)
                                : static_cast<int>(sizes.seqlen_q);
      if (first_row >= sizes.seqlen_q) end_head = first_head;
      first_tile = first_row / Config::kRows;
    }
  }
};

// Copies rows of a matrix to s_tile. Row i of s_tile receives row first_row + i of the matrix if i
// is in [begin, end) (kBits is false), or if bit i of `rows` is set (kBits is true). Sets all other
// rows of s_tile to zero. Sets the columns from column `cols` on to zero, too.
template <typename Config, bool kBits = false, typename Tile, typename T>
__device__ __forceinline__ void load_tile(Tile& s_tile, const T* g_head, int64_t row_stride,
                                          int first_row, int begin, int end, int64_t cols,
                                          [[maybe_unused]] uint64_t rows = 0) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  constexpr int kRowsAtOnce = Config::kThreads / Tile::kChunks;
  static_assert(Config::kThreads % Tile::kChunks == 0 && Tile::kRows % kRowsAtOnce == 0);
  const int chunk = threadIdx.x % Tile::kChunks;
  const int64_t left = (cols - chunk * kElems) * static_cast<int64_t>(sizeof(T));
  const int bytes = left < 0 ? 0 : (left > kVectorBytes ? kVectorBytes : static_cast<int>(left));
  const uint32_t s_base = shared_address(s_tile.s_data);
  int row = threadIdx.x / Tile::kChunks;
  const T* g_from = g_head + (first_row + row) * row_stride + chunk * kElems;
#pragma unroll
  for (int i = 0; i < Tile::kRows / kRowsAtOnce; ++i) {
    const bool live =
        kBits ? (rows >> row & 1) != 0 && bytes > 0 : row >= begin && row < end && bytes > 0;
    copy_async_16(s_base + Tile::offset(row, chunk), live ? g_from : g_head, live ? bytes : 0);
    row += kRowsAtOnce;
    g_from += kRowsAtOnce * row_stride;
  }
}

}  // namespace torchweld
