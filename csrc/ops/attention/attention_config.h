// Which kernel and tile attention's forward takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/family.h"
#include "core/index.h"

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

// Of few query rows: the query heads of a kv head and their rows are packed into kRows rows. The
// keys of a sequence are cut into splits, one a block, and these among the block's `warps` warps,
// each of which walks its own, `keys` at a time, with `stages` buffers of keys and values.
struct AttentionDecodeTile {
  int dim;
  int keys;
  int stages;
  int warps;

  static constexpr int kRows = 16;
  static constexpr int kMostSeqlen = 16;  // of the query
  static constexpr int kMostSplits = 128;

  constexpr int threads() const { return warps * 32; }
  constexpr int step_keys() const { return warps * keys; }
  // 16-bit query rows, keys and values. The warps' sums, in fp32, take the place of keys and
  // values.
  constexpr int tile_bytes() const { return (kRows + 2 * stages * step_keys()) * dim * 2; }
};

// Those of a head dim from the one with most in flight to the one for the least shared memory.
inline constexpr AttentionDecodeTile kAttentionDecodeTiles[] = {
    {64, 16, 3, 8},  {64, 32, 2, 4},  {128, 16, 3, 8}, {128, 16, 3, 4},
    {128, 16, 2, 4}, {256, 16, 3, 4}, {256, 16, 2, 2}};
inline constexpr int kNumAttentionDecodeTiles =
    sizeof(kAttentionDecodeTiles) / sizeof(kAttentionDecodeTiles[0]);

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

// kSync: mma.sync. kGeneral: any sizes, without tensor cores. kDecode: few query rows, with the
// keys split; forward alone.
enum class AttentionEngine : int8_t { kSync, kGeneral, kDecode };

struct AttentionChoice {
  AttentionEngine engine;
  int tile;        // index into the engine's tiles, 0 for kGeneral
  int splits = 1;  // of the keys, by kDecode
};

inline constexpr const char* kAttentionOtherDtype = "the tile is for another dtype";

// Of a tile for head dims up to `dim`, whatever its dtype.
inline Refusal attention_sizes_refusal(const AttentionProblem& p, int dim) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29;  // positions are counted in 32 bits
  if (p.head_dim > dim || p.head_dim_v > dim) return {"the tile holds head dims to {}", dim};
  if (p.head_dim == 0 || p.head_dim_v == 0) return "no tile takes a head dim of 0";
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen) {
    return {"no tile takes sequences longer than {}", kMaxSeqlen};
  }
  return {};
}

inline Refusal attention_refusal(const AttentionProblem& p, const AttentionTile& tile) {
  return tile.math == p.math ? attention_sizes_refusal(p, tile.dim) : kAttentionOtherDtype;
}

// What the decode kernel keeps in shared memory beside its tile.
inline constexpr int kAttentionDecodeExtraBytes = 4 * 1024;

// Blocks, were the keys not split.
inline int64_t attention_decode_groups(const AttentionProblem& p) {
  return p.load.heads / p.load.group *
         divide_up(p.load.group * p.seqlen_q, AttentionDecodeTile::kRows);
}

inline Refusal attention_decode_refusal(const AttentionProblem& p, const AttentionDecodeTile& tile,
                                        int splits) {
  if (p.math != AttentionMath::k16Bit) return kAttentionOtherDtype;
  if (p.seqlen_q > AttentionDecodeTile::kMostSeqlen) {
    return {"the tile is for sequences of at most {} query rows", AttentionDecodeTile::kMostSeqlen};
  }
  if (const Refusal reason = attention_sizes_refusal(p, tile.dim)) return reason;
  if (tile.tile_bytes() + kAttentionDecodeExtraBytes > p.device.shared_limit) {
    return too_much_shared_memory(tile.tile_bytes(), p.device.shared_limit);
  }
  if (splits < 1 || splits > AttentionDecodeTile::kMostSplits) {
    return {"keys can be cut into 1 to {} splits", AttentionDecodeTile::kMostSplits};
  }
  return grid_fits(static_cast<double>(attention_decode_groups(p)) * splits)
             ? Refusal()
             : "more than 2^31 - 1 blocks";
}

// A block for every SM, while each has some steps to walk. More would only add parts.
inline int attention_decode_splits(const AttentionProblem& p, const AttentionDecodeTile& tile) {
  constexpr int64_t kLeastSteps = 2;
  const int64_t groups = std::max<int64_t>(1, attention_decode_groups(p));
  const int64_t steps = divide_up(p.seqlen_k, tile.step_keys());
  const int64_t most = std::min<int64_t>(AttentionDecodeTile::kMostSplits, steps / kLeastSteps);
  const int64_t room = p.device.sms / groups;
  return static_cast<int>(std::max<int64_t>(1, std::min(room, most)));
}

inline AttentionChoice choose_attention(const AttentionProblem& p) {
  for (int i = 0; i < kNumAttentionDecodeTiles; ++i) {
    const AttentionDecodeTile& tile = kAttentionDecodeTiles[i];
    if (attention_decode_refusal(p, tile, 1)) continue;
    return {AttentionEngine::kDecode, i, attention_decode_splits(p, tile)};
  }
  for (int i = 0; i < kNumAttentionTiles; ++i) {
    if (!attention_refusal(p, kAttentionTiles[i])) return {AttentionEngine::kSync, i};
  }
  return {AttentionEngine::kGeneral, 0};
}

}  // namespace torchweld
