// Which kernel and tile attention's forward takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

namespace torchweld {

// What the products are made of: elements of 16 bits; fp32 rounded to TF32; fp32 to its accuracy,
// as three bf16 pieces a value.
enum class AttentionMath { k16Bit, kTf32, kFloat32 };

constexpr int elem_size(AttentionMath math) { return math == AttentionMath::k16Bit ? 2 : 4; }

inline constexpr int kSplitBytes = 6;  // of a value in pieces

// `warps` warps hold `rows` query rows and walk the keys `keys` at a time, with `stages` buffers of
// keys and values. Head dims up to `dim` are filled up with zeros. In fp32 there is a buffer of
// pieces and one of what arrives: for keys and for values, or with one stage for both in turn.
struct AttentionTile {
  AttentionMath math;
  int dim;
  int rows;
  int keys;
  int stages;
  int warps;
  int blocks_per_sm;  // what the registers are cut for

  constexpr int threads() const { return warps * 32; }
  constexpr int tile_bytes() const {
    const int size = elem_size(math);
    if (math == AttentionMath::kFloat32) {
      return (kSplitBytes * rows + stages * (kSplitBytes + size) * keys) * dim;
    }
    return (rows + 2 * stages * keys) * dim * size;
  }
};

// What a block may use on the devices with the least shared memory (sm_86, sm_89, sm_120).
inline constexpr int kAttentionSharedBytes = 99 * 1024;

// A warp's 32 query rows take every key and value that it reads from shared memory twice; head dims
// above 128 leave registers for 16, in fp32 shared memory does above 64.
inline constexpr AttentionTile kAttentionTiles[] = {
    {AttentionMath::k16Bit, 64, 128, 64, 2, 4, 2},
    {AttentionMath::k16Bit, 128, 128, 64, 2, 4, 2},
    {AttentionMath::k16Bit, 256, 64, 32, 2, 4, 2},
    {AttentionMath::kTf32, 64, 128, 32, 2, 4, 2},
    {AttentionMath::kTf32, 128, 128, 16, 2, 4, 2},
    {AttentionMath::kTf32, 256, 64, 16, 1, 4, 2},
    {AttentionMath::kFloat32, 64, 128, 32, 2, 4, 2},
    {AttentionMath::kFloat32, 128, 64, 32, 1, 4, 2},
    {AttentionMath::kFloat32, 256, 32, 16, 1, 2, 2}};
inline constexpr int kNumAttentionTiles = sizeof(kAttentionTiles) / sizeof(kAttentionTiles[0]);

struct AttentionProblem {
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  AttentionMath math;
};

// An index into kAttentionTiles, or -1 for the general kernel: head dims that no tile holds, none
// at all, and sequences whose positions do not fit in 32 bits.
constexpr int choose_attention_tile(const AttentionProblem& problem) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29;
  if (problem.head_dim == 0 || problem.head_dim_v == 0) return -1;
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) return -1;
  for (int i = 0; i < kNumAttentionTiles; ++i) {
    const AttentionTile& tile = kAttentionTiles[i];
    if (tile.math == problem.math && problem.head_dim <= tile.dim &&
        problem.head_dim_v <= tile.dim) {
      return i;
    }
  }
  return -1;
}

}  // namespace torchweld
