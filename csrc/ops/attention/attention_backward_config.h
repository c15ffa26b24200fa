// Which tile the gradient of attention takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

namespace torchweld {

// Turns at dQ are counted per warp and tile: at most one to this many query rows.
inline constexpr int kAttentionBackwardRowsPerTurn = 4;

// A block of `warps` warps owns `keys` keys, a strip of them each warp, and walks the query rows
// `rows` at a time. It computes the scores of `cols` rows at once.
struct AttentionBackwardTile {
  int elem_size;  // bytes
  int head_dim;   // the larger of head_dim and head_dim_v is at most this
  int keys;
  int rows;
  int cols;
  int warps;
  int blocks_per_sm;
  bool prefetches;  // dQ's sums are read ahead where nobody has to be waited for
  bool split;       // dV and dK in launches of their own: one warp's registers don't hold both

  constexpr int threads() const { return warps * 32; }
  constexpr int strips() const { return keys / (warps * 16); }
  // K and V; twice Q, dO, dS, lse and delta; the ticket.
  constexpr int shared_bytes() const {
    return elem_size * (2 * keys * head_dim + 4 * rows * head_dim + 2 * keys * rows) + 16 * rows +
           128;
  }
  // The sums of a warp's strips, kept over the whole walk.
  constexpr int sum_registers() const { return (split ? 1 : 2) * strips() * head_dim / 2; }
  // A warp's share of a dQ tile.
  constexpr int share_registers() const { return rows * head_dim / threads(); }
  constexpr bool valid() const {
    return keys == strips() * warps * 16 && rows % cols == 0 && cols % 16 == 0 && 64 % rows == 0 &&
           sum_registers() <= 128 && share_registers() <= 64 &&
           warps * kAttentionBackwardRowsPerTurn <= rows;
  }
};

// In the order of preference: the first that the problem fits is taken. The smaller ones are for
// devices with 99 KB of shared memory a block.
// NOTE: none in fp32 above 128 columns: the operands of three passes and a warp's sums don't fit in
// its registers together.
inline constexpr AttentionBackwardTile kAttentionBackwardTiles[] = {
    {2, 64, 128, 64, 32, 4, 2, false, false}, {2, 128, 128, 64, 64, 8, 1, true, false},
    {2, 128, 64, 32, 32, 4, 1, true, false},  {2, 256, 64, 32, 32, 4, 1, false, true},
    {2, 256, 32, 16, 16, 2, 1, false, true},  {4, 64, 64, 32, 16, 4, 2, false, true},
    {4, 128, 64, 32, 16, 4, 1, false, true},  {4, 128, 32, 16, 16, 2, 1, false, true}};
inline constexpr int kNumAttentionBackwardTiles =
    sizeof(kAttentionBackwardTiles) / sizeof(kAttentionBackwardTiles[0]);

// Query rows are padded to a multiple of this in scratch memory: whole tiles of any height.
inline constexpr int64_t kAttentionBackwardRowPad = 64;

struct AttentionBackwardProblem {
  int64_t head_dim;
  int64_t head_dim_v;
  int elem_size;
  int shared_bytes;  // the most that a block of the device may have
};

// An index into kAttentionBackwardTiles, or -1 for the general kernels.
constexpr int choose_attention_backward_tile(const AttentionBackwardProblem& problem) {
  for (int i = 0; i < kNumAttentionBackwardTiles; ++i) {
    const AttentionBackwardTile& tile = kAttentionBackwardTiles[i];
    if (tile.elem_size == problem.elem_size && problem.head_dim <= tile.head_dim &&
        problem.head_dim_v <= tile.head_dim && tile.shared_bytes() <= problem.shared_bytes) {
      return i;
    }
  }
  return -1;
}

// The kv heads whose blocks are in flight together. Few blocks of one head then wait for each
// other's turns at dQ, and what the blocks of a head share is still in the L2 cache.
constexpr int64_t attention_backward_heads_at_once(int64_t bytes_per_head) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t heads = bytes_per_head > 0 ? kCacheBytes / bytes_per_head : 64;
  return heads < 16 ? 16 : (heads > 64 ? 64 : heads);
}

}  // namespace torchweld
