// Which kernel and tile attention's forward takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

namespace torchweld {

// kAttentionThreads threads hold `rows` query rows and walk the keys `keys` at a time, with
// `stages` buffers of keys and values. Head dims up to `dim` are filled up with zeros.
struct AttentionTile {
  int dim;
  int elem_size;
  int rows;
  int keys;
  int stages;
  int blocks_per_sm;  // what the registers are cut for

  constexpr int tile_bytes() const { return (rows + 2 * stages * keys) * dim * elem_size; }
};

inline constexpr int kAttentionThreads = 128;

// What a block may use on the devices with the least shared memory (sm_86, sm_89, sm_120).
inline constexpr int kAttentionSharedBytes = 99 * 1024;

// A warp's 32 query rows take every key and value that it reads from shared memory twice; head dims
// above 128 leave registers for 16.
inline constexpr AttentionTile kAttentionTiles[] = {
    {64, 2, 128, 64, 2, 2}, {128, 2, 128, 64, 2, 2}, {256, 2, 64, 32, 2, 2},
    {64, 4, 128, 32, 2, 2}, {128, 4, 128, 16, 2, 2}, {256, 4, 64, 16, 1, 2}};
inline constexpr int kNumAttentionTiles = sizeof(kAttentionTiles) / sizeof(kAttentionTiles[0]);

struct AttentionProblem {
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  int elem_size;  // bytes
};

// An index into kAttentionTiles, or -1 for the general kernel: head dims that no tile holds, none
// at all, and sequences whose positions do not fit in 32 bits.
constexpr int choose_attention_tile(const AttentionProblem& problem) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29;
  if (problem.head_dim == 0 || problem.head_dim_v == 0) return -1;
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) return -1;
  for (int i = 0; i < kNumAttentionTiles; ++i) {
    const AttentionTile& tile = kAttentionTiles[i];
    if (tile.elem_size == problem.elem_size && problem.head_dim <= tile.dim &&
        problem.head_dim_v <= tile.dim) {
      return i;
    }
  }
  return -1;
}

}  // namespace torchweld
