// Defines BackwardWorkTile, the part of attention's backward that one block computes, and
// load_tile, which copies rows of a tensor into shared memory.
#pragma once

#include <climits>

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
  __device__ __forceinline__ void get_work(const BackwardArgs& args, unsigned* g_ticket) {
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
    const int head = part / parts, part_of_head = part % parts;
    sequence = head / nheads_kv;
    head_kv = head % nheads_kv;
    first_key = key_tile * Config::kKeys;
    first_head = head * group + part_of_head * group / parts;
    end_head = head * group + (part_of_head + 1) * group / parts;
    tile_steps = args.params.mask.is_uneven() ? end_head - first_head : 1;
    direction = args.wave > 0 && rest / args.wave % 2 == 1 ? 1 : -1;
    if constexpr (Config::kMasked) {
      dq_order = key_tile;
      span.begin = first_tile = INT_MAX;
      span.end = last_tile = 0;
    } else {
      span = SequenceSpan(args, sequence);
      dq_order = key_tile - span.pad / Config::kKeys;
      const int first_row = first_key + Config::kKeys > span.pad
                                ? span.first_row_seeing(args.params.mask, first_key)
                                : static_cast<int>(sizes.seqlen_q);
      if (first_row >= sizes.seqlen_q) end_head = first_head;
      first_tile = first_row / Config::kRows;
      last_tile = static_cast<int>(sizes.seqlen_q - 1) / Config::kRows;
    }
  }

  // The version of get_work for a general mask. The kThreads threads that call this function are
  // the whole block or one warp. dq_order is the index of the key tile. A group consists of
  // kAttentionBackwardRowPad query rows and has a range of keys. The loop needs the groups with a
  // range that overlaps the block's keys. first_tile is the first query tile of the first such
  // group, and last_tile is the last query tile of the last such group.
  template <typename Config, int kThreads = Config::kThreads>
  __device__ __forceinline__ void get_work_masked(const MaskedBackwardArgs& args,
                                                  unsigned* g_ticket) {
    constexpr int kGroupTiles = kAttentionBackwardRowPad / Config::kRows;
    const auto sync = [] {
      if constexpr (kThreads == kWarp) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
    if (threadIdx.x == 0) get_work<Config>(args, g_ticket);
    sync();
    if (is_end()) return;
    const int groups = static_cast<int>(args.rows / kAttentionBackwardRowPad);
    for (int i = threadIdx.x; i < groups; i += kThreads) {
      const BlockMask& group = args.group_of(sequence, i * kAttentionBackwardRowPad);
      if (group.begin >= first_key + Config::kKeys || group.end <= first_key) continue;
      atomicMin(&span.begin, group.begin);
      atomicMax(&span.end, group.end);
      atomicMin(&first_tile, i * kGroupTiles);
      atomicMax(&last_tile, (i + 1) * kGroupTiles - 1);
    }
    sync();
    if (threadIdx.x == 0) {
      const int rows = static_cast<int>(args.params.sizes.seqlen_q);
      if (span.end == 0) end_head = first_head;
      last_tile = min(last_tile, (rows - 1) / Config::kRows);
    }
    sync();
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
