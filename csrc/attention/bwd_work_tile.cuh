// The work tile of a block of attention's backward, and the loads of its tiles into shared memory.
#pragma once

#include <climits>

#include "attention/bwd_args.cuh"
#include "core/index.h"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {

// The work tile of a block. It stays in shared memory to save registers. Span is SequenceSpan.
// Under a general mask, Span is KeyRange32, and `span` is the range of keys that the rows of the
// block's query tiles see.
template <typename Span>
struct alignas(8) BackwardWorkTile {
  int sequence;  // kNoWork if all work tiles have been drawn
  int head_kv;
  int first_key;
  int dq_order;  // this block's position in the order in which blocks add to a dQ tile
  Span span;
  int first_head;  // query heads [first_head, end_head), counted over all batch * nheads heads
  int end_head;
  int first_tile;  // query tiles [first_tile, last_tile] of each head
  int last_tile;
  // Only for Hopper's kernels: the number of query heads that the loop processes with a tile index
  // before it moves to the next tile index.
  // NOTE: tile_steps is 1 if all blocks have the same query tiles. Otherwise the blocks of later
  // keys have fewer query tiles. With tile_steps = 1 they would wait for the blocks of earlier keys
  // at the end of every head.
  int tile_steps;
  int direction;   // only for Hopper: 1 if the loop visits the tiles in ascending order, else -1
  int first_step;  // only for the persistent kernel: the iterations of the CTA's earlier work tiles
  int part;        // index of the part among all batch * nheads_kv * group_parts parts

  static constexpr int kNoWork = -1;
  __device__ __forceinline__ bool is_end() const { return sequence == kNoWork; }

  // Only for Hopper's kernels: the number of iterations of the loop over the tiles of all heads.
  __device__ __forceinline__ int steps() const {
    return (end_head - first_head) * (last_tile - first_tile + 1);
  }
  // The tile with which the loop starts.
  __device__ __forceinline__ int start_tile() const {
    return direction > 0 ? first_tile : last_tile;
  }

  // Draws a ticket and fills the work tile. One thread calls this function. The parts run in sets
  // of parts_at_once parts. Within a set, tickets ascend with the key tile: the first tickets are
  // for key tile 0 of all parts, the next tickets for key tile 1 of all parts. Under a
  // general mask, first_tile and last_tile are the first and the last query tile in which some row
  // sees a key of the block.
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
    const int head = part / parts, part_of_head = part % parts;
    sequence = head / nheads_kv;
    head_kv = head % nheads_kv;
    first_key = key_tile * Config::kKeys;
    first_head = head * group + part_of_head * group / parts;
    end_head = head * group + (part_of_head + 1) * group / parts;
    tile_steps = args.params.mask.is_uneven() ? end_head - first_head : 1;
    direction = args.wave > 0 && rest / args.wave % 2 == 1 ? 1 : -1;
    if constexpr (Config::kMasked) {
      constexpr int kGroupTiles = kAttentionBackwardRowPad / Config::kRows;
      KeyTileRange range = {0, 0, 0, 0};
      if (args.rows > 0) {
        range = args.g_key_tiles[int64_t{sequence} * args.key_tiles + key_tile];
      }
      dq_order = key_tile;
      span = {range.begin, range.end};
      if (range.end == 0) end_head = first_head;
      first_tile = range.first_group * kGroupTiles;
      last_tile = min((range.last_group + 1) * kGroupTiles,
                      static_cast<int>((sizes.seqlen_q + Config::kRows - 1) / Config::kRows)) -
                  1;
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
};

// Writes the KeyTileRanges. All threads of a grid of one-dimensional blocks call this function, and
// the first warp of each block works.
inline __device__ void find_key_tiles(const MaskedBackwardArgs& args) {
  if (threadIdx.x >= kWarp) return;
  const int groups = static_cast<int>(args.rows) / kAttentionBackwardRowPad;
  const int64_t tiles = args.params.sizes.batch * args.key_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t sequence = tile / args.key_tiles;
    const int first_key = static_cast<int>(tile - sequence * args.key_tiles) * args.tile_keys;
    const BlockMask* const g_groups = args.g_groups + sequence * groups;
    int begin = INT_MAX, end = 0, first_group = INT_MAX, last_group = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < groups; i += kWarp) {
      const int2 keys = *reinterpret_cast<const int2*>(&g_groups[i]);  // begin and end
      if (keys.x >= first_key + args.tile_keys || keys.y <= first_key) continue;
      begin = min(begin, keys.x);
      end = max(end, keys.y);
      first_group = min(first_group, i);
      last_group = max(last_group, i);
    }
    begin = __reduce_min_sync(~0u, begin);
    end = __reduce_max_sync(~0u, end);
    first_group = __reduce_min_sync(~0u, first_group);
    last_group = __reduce_max_sync(~0u, last_group);
    if (threadIdx.x == 0) {
      args.g_key_tiles[tile] =
          end > 0 ? KeyTileRange{begin, end, first_group, last_group} : KeyTileRange{0, 0, 0, 0};
    }
  }
}

// Loads rows [begin, end) of a tile. If kBits is true, loads the rows whose bit is set in `rows`
// instead. Sets the other rows, and columns from `cols` on, to zero.
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
