// Which kernel and tile attention's forward takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

#include "core/family.h"

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

// What else than the sizes of a head decides how long a call takes.
struct AttentionLoad {
  int64_t heads;  // batch * nheads
  int64_t group;  // query heads that share a kv head
  bool causal, padded, bfloat16;
};

struct AttentionProblem {
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  AttentionMath math;
  AttentionLoad load;
  DeviceFacts device;
};

// kSync: mma.sync. kGeneral: any sizes, without tensor cores.
enum class AttentionEngine : int8_t { kSync, kGeneral };

struct AttentionChoice {
  AttentionEngine engine;
  int tile;  // index into kAttentionTiles or kAttentionBackwardTiles, 0 for kGeneral
};

inline Refusal attention_refusal(const AttentionProblem& p, const AttentionTile& tile) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29;  // positions are counted in 32 bits
  if (tile.math != p.math) return "the tile is for another dtype";
  if (p.head_dim > tile.dim || p.head_dim_v > tile.dim) {
    return {"the tile holds head dims to {}", tile.dim};
  }
  if (p.head_dim == 0 || p.head_dim_v == 0) return "no tile takes a head dim of 0";
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen) {
    return {"no tile takes sequences longer than {}", kMaxSeqlen};
  }
  return {};
}

inline AttentionChoice choose_attention(const AttentionProblem& p) {
  for (int i = 0; i < kNumAttentionTiles; ++i) {
    if (!attention_refusal(p, kAttentionTiles[i])) return {AttentionEngine::kSync, i};
  }
  return {AttentionEngine::kGeneral, 0};
}

}  // namespace torchweld
