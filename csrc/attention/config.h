// Chooses the kernel and the tile of attention's forward. This is pure host code. Tests run it
// without a GPU, and `explain` prints the choice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/index.h"
#include "core/refusal.h"

namespace torchweld {

// The operands of the matmuls: 16-bit elements, fp32 values rounded to TF32, or exact fp32 values
// as three bf16 terms each.
enum class AttentionMath { k16Bit, kTf32, kFloat32 };

constexpr int elem_size(AttentionMath math) { return math == AttentionMath::k16Bit ? 2 : 4; }

inline constexpr int kBf16x3Bytes = 6;  // bytes of the three bf16 terms of a value

// A block has `warps` warps and `rows` query rows. It loops over the keys, `keys` keys at a time.
// Shared memory has `stages` stages. In 16 bits and TF32, each stage has a buffer for keys and a
// buffer for values. In fp32, each stage holds either keys or values, and has two buffers: one for
// fp32 numbers that are being loaded, and one for the bf16 terms that are multiplied. If there is
// only one such stage, it holds keys and values alternately. Head dims below `dim` are padded with
// zeros.
struct AttentionTile {
  AttentionMath math;
  int dim;
  int rows;
  int keys;
  int stages;
  int warps;
  int blocks_per_sm;  // number of blocks per SM, which limits the registers per thread

  constexpr int threads() const { return warps * 32; }
  constexpr int tile_bytes() const {
    const int size = elem_size(math);
    if (math == AttentionMath::kFloat32) {
      return (kBf16x3Bytes * rows + stages * (kBf16x3Bytes + size) * keys) * dim;
    }
    return (rows + 2 * stages * keys) * dim * size;
  }
};

// The largest shared memory of a block on sm_86, sm_89 and sm_120, in bytes. Other devices allow
// more.
inline constexpr int kAttentionSharedBytes = 99 * 1024;

// A warp has 32 query rows, that is, two m16 tiles. It uses every loaded fragment of keys and
// values twice. For head dims above 128, a warp has registers for only 16 rows. For head dims above
// 64 in fp32, shared memory has space for only 16 rows per warp.
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

// A tile for few query rows. A tile of kRows rows holds packed rows of all query heads that share a
// kv head. The keys of a sequence are divided into splits, one per block. The `warps` warps of a
// block alternate over tiles of `keys` keys. Each warp has its own `stages` buffers of keys and
// values.
struct AttentionDecodeTile {
  int dim;
  int keys;
  int stages;
  int warps;

  static constexpr int kRows = 16;
  static constexpr int kMaxSeqlenQ = 16;
  static constexpr int kMaxSplits = 128;

  constexpr int threads() const { return warps * 32; }
  constexpr int step_keys() const { return warps * keys; }
  // The bytes of 16-bit query rows, keys and values. The fp32 sums of the warps later overwrite the
  // keys and values.
  constexpr int tile_bytes() const { return (kRows + 2 * stages * step_keys()) * dim * 2; }
};

// Among the tiles of one head dim, earlier tiles have more bytes in flight and more shared memory
// than later tiles.
inline constexpr AttentionDecodeTile kAttentionDecodeTiles[] = {
    {64, 16, 3, 8},  {64, 32, 2, 4},  {128, 16, 3, 8}, {128, 16, 3, 4},
    {128, 16, 2, 4}, {256, 16, 3, 4}, {256, 16, 2, 2}};
inline constexpr int kNumAttentionDecodeTiles =
    sizeof(kAttentionDecodeTiles) / sizeof(kAttentionDecodeTiles[0]);

// A tile of Hopper's kernel. A warpgroup has 64 query rows and loops over the keys, `keys` at a
// time, with `stages` buffers of keys and values. Head dims below `dim` and `dim_v` are padded with
// zeros.
struct AttentionSm90Tile {
  int dim;
  int dim_v;
  int warpgroups;
  int keys;
  int stages;
  int blocks;  // number of blocks that share an SM
  int speed;   // measured TFLOP/s with many long rows on an H200

  static constexpr int kWarpgroupRows = 64;
  // The number of columns in a TMA box. A row of the box fills a swizzle row of 128 bytes.
  static constexpr int kBoxColumns = 64;

  constexpr int rows() const { return warpgroups * kWarpgroupRows; }
  // Whether the tile has a kernel with dropout. Larger tiles have no registers for random bits.
  constexpr bool supports_dropout() const {
    return dim == dim_v && dim <= 128 && warpgroups <= 2 && keys <= 128;
  }
  // Whether the tile has a kernel with a bias. Beside several blocks per SM, shared memory has no
  // space for it.
  constexpr bool supports_bias() const { return supports_dropout() && blocks == 1; }
  // Whether the tile has a kernel with ALiBi.
  constexpr bool supports_alibi() const { return dim == dim_v && dim <= 128; }
  // Whether a work tile may have parts, with the rows of one document each
  // (MaskedAttentionBlock). Beside three consumer warpgroups, the producer has no registers for it.
  static constexpr bool has_parts(int warpgroups) { return warpgroups <= 2; }
  // The number of keys in a step under a general mask.
  // NOTE: a mask needs registers. If the accumulators of O are wide, they leave enough registers
  // for a mask only if the tile has fewer keys.
  constexpr int masked_keys() const { return dim_v > 128 ? 64 : keys; }
  // If several blocks share an SM, the producer is a warp. Otherwise the producer is a warpgroup,
  // which gives most of its registers to the consumers (setmaxnreg).
  constexpr int threads() const { return 128 * warpgroups + (blocks == 1 ? 128 : 32); }
  // The number of TMA boxes that `columns` columns need in shared memory.
  static constexpr int boxes(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
  // The bytes of the buffer for the query rows of a work tile. A warpgroup later overwrites its
  // query rows with its output, so the output must fit as well.
  constexpr int query_bytes() const {
    return 2 * kBoxColumns * rows() * std::max(boxes(dim), boxes(dim_v));
  }
  constexpr int stages_bytes() const {
    return stages * 2 * kBoxColumns * keys * (boxes(dim) + boxes(dim_v));
  }
  // The number of buffers for query rows. It is 2 if shared memory has space for the query rows of
  // two work tiles, else 1. With 2 buffers, the next work tile loads while the current one is
  // computed.
  constexpr int query_stages() const {
    return 2 * query_bytes() + stages_bytes() + extra_bytes(rows()) <=
                   kSmBytes / blocks - kBlockBytes
               ? 2
               : 1;
  }
  constexpr int tile_bytes() const { return query_stages() * query_bytes() + stages_bytes(); }

  // The bytes of shared memory that the kernel needs in addition to its tile: barriers, and the key
  // ranges of the rows of two work tiles.
  static constexpr int extra_bytes(int rows) { return (rows > 128 ? 4 : 3) * 1024; }
  // kSmBytes is the shared memory of an SM on Hopper. The hardware reserves kBlockBytes of it for
  // each block.
  static constexpr int kSmBytes = 228 * 1024, kBlockBytes = 1024;
};

// If rows see few keys (short rows), the start and the end of a block take most of the time. Tiles
// of one warpgroup are then faster, because a block can end while other blocks of the SM continue.
// For long rows, tiles with many query rows are faster, because all rows of a tile share the loaded
// keys.
inline constexpr AttentionSm90Tile kAttentionSm90Tiles[] = {
    {64, 64, 3, 128, 2, 1, 510},   {64, 64, 2, 128, 2, 1, 445},   {64, 64, 1, 64, 3, 3, 440},
    {96, 96, 2, 160, 2, 1, 570},   {128, 128, 2, 160, 2, 1, 644}, {128, 128, 2, 128, 2, 1, 625},
    {192, 128, 2, 128, 2, 1, 744}, {256, 256, 2, 80, 2, 1, 770},  {64, 128, 2, 128, 2, 1, 594},
    {128, 64, 2, 128, 2, 1, 590}};
inline constexpr int kNumAttentionSm90Tiles =
    sizeof(kAttentionSm90Tiles) / sizeof(kAttentionSm90Tiles[0]);

// The tile of Hopper's kernels for head dims above 256 (attention/wide). A cluster of two CTAs has
// kRows rows, 64 in each CTA. Head dims below kDim are padded with zeros.
struct AttentionWideTile {
  static constexpr int kDim = 512, kAboveDim = 256;
  static constexpr int kCtas = 2, kCtaRows = 64, kRows = kCtas * kCtaRows, kThreads = 512;
  // The number of keys in a step of the forward, and of rows in a step of the gradients of Q and K.
  static constexpr int kKeys = 128, kBackwardRows = 64;
  static constexpr int kStages = 4;  // of the scores' right operand
  static constexpr int kMaxSplits = 32;
  // The bytes of shared memory: the tile, then barriers and the key ranges of the rows.
  static constexpr int kTileBytes = 224 * 1024, kExtraBytes = 3 * 1024;
};

// Whether no tile for the same head dims is faster with many long rows. The batch-invariant mode
// uses the steps of such tiles.
constexpr bool attention_sm90_is_fastest(int index) {
  const AttentionSm90Tile& tile = kAttentionSm90Tiles[index];
  for (const AttentionSm90Tile& other : kAttentionSm90Tiles) {
    if (other.dim == tile.dim && other.dim_v == tile.dim_v && other.speed > tile.speed)
      return false;
  }
  return true;
}

// The properties of a call that affect its cost or the choice of its kernel, in addition to the
// sequence lengths and the head dims.
struct AttentionLoad {
  int64_t heads;  // batch * nheads
  int64_t group;  // number of query heads that share a kv head
  bool causal, padded, bfloat16;
  int64_t window;  // 0 if there is no window
  bool packed;     // true if key_start or a key_end per row is given
  bool softcap;
  bool dropout;
  bool bias;
  // true if the query heads of a kv head, with one query each, can be the rows of one sequence,
  // because they see the same keys
  bool packable = false;
  bool alibi = false;
};

struct AttentionProblem {
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  AttentionMath math;
  AttentionLoad load;
  DeviceFacts device;
  bool invariant = false;  // whether the bits of a row must not depend on the other rows
};

// kSync uses mma.sync. kGeneral supports any sizes and uses no tensor cores. kDecode is for few
// query rows: it splits the keys and has no backward. kSm90 uses Hopper's wgmma and TMA. kChain is
// for few query rows in the batch-invariant mode: it gives the bits of kSm90 and has no backward.
// kWide uses wgmma and TMA for head dims above 256.
enum class AttentionEngine : int8_t { kSync, kGeneral, kDecode, kSm90, kChain, kWide };

struct AttentionChoice {
  AttentionEngine engine;
  // index into the engine's table of tiles, 0 for kGeneral and kWide; kChain has the steps of a
  // tile of kSm90
  int tile;
  int splits = 1;  // the number of splits of the keys, for kDecode and kWide; of steps, for kChain
};

// Returns the number of keys in a step of the chosen tensor-core kernel under a general mask, and 1
// for other kernels.
inline int attention_step_keys(const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kSm90 || choice.engine == AttentionEngine::kChain) {
    return kAttentionSm90Tiles[choice.tile].masked_keys();
  }
  if (choice.engine == AttentionEngine::kWide) return AttentionWideTile::kKeys;
  if (choice.engine == AttentionEngine::kSync) return kAttentionTiles[choice.tile].keys;
  return 1;
}

inline constexpr const char* kAttentionOtherDtype = "the tile is for another dtype";
inline constexpr const char* kAttentionNoWgmma = "the GPU, or the code built for it, has no wgmma";
inline constexpr const char* kAttentionOtherKeys =
    "the batch-invariant mode has steps of another number of keys";

// Returns the reason why a tile does not support the dropout, the bias or the ALiBi of the problem,
// or an empty Refusal. `dropout`, `bias` and `alibi` tell what the tile supports.
inline Refusal attention_extras_refusal(const AttentionProblem& p, bool dropout = false,
                                        bool bias = false, bool alibi = false) {
  if (p.load.dropout && !dropout) return "the tile does not support dropout";
  if (p.load.alibi && !alibi) return "the tile does not support ALiBi";
  return p.load.bias && !bias ? Refusal("the tile does not support a bias") : Refusal();
}

// Returns the reason why no tile supports the problem, or an empty Refusal if a tile may support
// it.
inline Refusal attention_sizes_refusal(const AttentionProblem& p) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 29;  // the kernels count positions in 32 bits
  if (p.load.dropout && p.load.softcap) return "no tile supports dropout with a soft cap";
  if (p.head_dim == 0 || p.head_dim_v == 0) return "no tile supports a head dim of 0";
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen) {
    return {"no tile supports sequences longer than {}", kMaxSeqlen};
  }
  return {};
}

// Returns the reason why a tile for head dims up to `dim` does not support the sizes of the
// problem. If the tile supports the sizes, returns an empty Refusal. The dtype is not checked here.
inline Refusal attention_sizes_refusal(const AttentionProblem& p, int dim) {
  if (p.head_dim > dim || p.head_dim_v > dim) return {"the tile supports head dims up to {}", dim};
  return attention_sizes_refusal(p);
}

inline Refusal attention_refusal(const AttentionProblem& p, const AttentionTile& tile) {
  if (tile.math != p.math) return kAttentionOtherDtype;
  if (const Refusal reason = attention_extras_refusal(p)) return reason;
  return attention_sizes_refusal(p, tile.dim);
}

inline Refusal attention_sm90_refusal(const AttentionProblem& p, const AttentionSm90Tile& tile) {
  if (!p.device.wgmma || !p.device.tma) return kAttentionNoWgmma;
  if (p.math != AttentionMath::k16Bit) return kAttentionOtherDtype;
  if (p.head_dim > tile.dim || p.head_dim_v > tile.dim_v) {
    return {"the tile supports head dims up to {} and {}", tile.dim, tile.dim_v};
  }
  if (const Refusal reason = attention_sizes_refusal(p)) return reason;
  if (const Refusal reason = attention_extras_refusal(
          p, tile.supports_dropout(), tile.supports_bias(), tile.supports_alibi())) {
    return reason;
  }
  if (p.head_dim_v % 8 != 0) return "the rows of the results are not aligned to 16 bytes";
  if (p.seqlen_k == 0) return "there are no keys";
  if (tile.tile_bytes() + tile.extra_bytes(tile.rows()) > p.device.shared_limit) {
    return too_much_shared_memory(tile.tile_bytes(), p.device.shared_limit);
  }
  // NOTE: the ticket counter may exceed the number of tiles by the number of blocks in the grid.
  const double tiles = static_cast<double>(p.load.heads) *
                       static_cast<double>(divide_up(p.seqlen_q, tile.rows()) + 1);
  return grid_fits(tiles + p.device.sms * tile.blocks) ? Refusal() : "more than 2^31 - 1 tiles";
}

// Checks what the forward and the gradients of the wide kernels have in common. The clusters divide
// the `rows` rows of each of `heads` heads among them.
inline Refusal attention_wide_refusal(const AttentionProblem& p, int64_t heads, int64_t rows) {
  using Tile = AttentionWideTile;
  if (!p.device.wgmma || !p.device.tma || !p.device.clusters) return kAttentionNoWgmma;
  if (p.math != AttentionMath::k16Bit) return kAttentionOtherDtype;
  if (std::max(p.head_dim, p.head_dim_v) <= Tile::kAboveDim) {
    return {"the tile is for head dims of {} to {}", Tile::kAboveDim + 1, Tile::kDim};
  }
  if (const Refusal reason = attention_sizes_refusal(p, Tile::kDim)) return reason;
  if (const Refusal reason = attention_extras_refusal(p)) return reason;
  if (p.head_dim_v % 8 != 0) return "the rows of the results are not aligned to 16 bytes";
  if (p.seqlen_k == 0) return "there are no keys";
  constexpr int kBytes = Tile::kTileBytes + Tile::kExtraBytes;
  if (kBytes > p.device.shared_limit) return too_much_shared_memory(kBytes, p.device.shared_limit);
  const double tiles =
      static_cast<double>(heads) * static_cast<double>(divide_up(rows, Tile::kRows));
  return grid_fits(tiles * Tile::kCtas) ? Refusal() : "more than 2^31 - 1 tiles";
}
inline Refusal attention_wide_refusal(const AttentionProblem& p, int splits) {
  if (const Refusal reason = attention_wide_refusal(p, p.load.heads, p.seqlen_q)) return reason;
  if (splits == 1) return {};
  if (splits < 1 || splits > AttentionWideTile::kMaxSplits) {
    return {"keys can be divided into 1 to {} splits", AttentionWideTile::kMaxSplits};
  }
  if (p.invariant) return kAttentionOtherKeys;
  if (p.load.softcap) return "splits have no soft cap";
  const double rows = static_cast<double>(p.load.heads) * static_cast<double>(p.seqlen_q);
  return grid_fits(rows * splits * AttentionWideTile::kCtas) ? Refusal()
                                                             : "more than 2^31 - 1 blocks";
}

// Returns the power of two of splits that takes the least time, by estimate, with at most one CTA
// per SM. Splits cost a second kernel, and the memory traffic of their fp32 results.
inline int attention_wide_splits(const AttentionProblem& p) {
  using Tile = AttentionWideTile;
  constexpr double kStepUs = 2.9, kSecondKernelUs = 5, kBytesPerUs = 3e6;
  if (attention_wide_refusal(p, 2)) return 1;
  const int64_t tiles = std::max<int64_t>(1, p.load.heads * divide_up(p.seqlen_q, Tile::kRows));
  const int64_t steps = divide_up(p.seqlen_k, Tile::kKeys);
  const double result_bytes = 8.0 * static_cast<double>(p.load.heads) *
                              static_cast<double>(p.seqlen_q) * static_cast<double>(p.head_dim_v);
  const auto time = [&](int splits) {
    const double loop = kStepUs * static_cast<double>(divide_up(steps, splits));
    return splits == 1 ? loop : loop + kSecondKernelUs + splits * result_bytes / kBytesPerUs;
  };
  int best = 1;
  for (int splits = 2; splits <= Tile::kMaxSplits; splits *= 2) {
    if (splits * tiles * Tile::kCtas <= p.device.sms && time(splits) < time(best)) best = splits;
  }
  return best;
}

// Returns the index of the tile whose number of keys the batch-invariant mode uses on Hopper, or -1
// if no tile supports the problem. The index depends on the head dims and on whether there is
// dropout or a bias, not on the batch and the sequence lengths.
inline int attention_invariant_tile(const AttentionProblem& p) {
  int fastest = -1;
  // The padding up to the tile's head dims costs time, too.
  const auto speed = [](const AttentionSm90Tile& tile) {
    return static_cast<double>(tile.speed) / (tile.dim + tile.dim_v);
  };
  for (int i = 0; i < kNumAttentionSm90Tiles; ++i) {
    const AttentionSm90Tile& tile = kAttentionSm90Tiles[i];
    if (!attention_sm90_is_fastest(i) || attention_sm90_refusal(p, tile)) continue;
    if (fastest < 0 || speed(tile) > speed(kAttentionSm90Tiles[fastest])) fastest = i;
  }
  return fastest;
}

// Returns why the batch-invariant mode does not use a tile of kSm90. `invariant` is the result of
// attention_invariant_tile(), which is not -1.
inline Refusal attention_invariant_refusal(const AttentionProblem& p, const AttentionSm90Tile& tile,
                                           int invariant) {
  if (tile.keys != kAttentionSm90Tiles[invariant].keys) return kAttentionOtherKeys;
  return p.load.packed && !tile.has_parts(tile.warpgroups)
             ? "the tile is not divided at documents in the batch-invariant mode"
             : Refusal();
}

// Estimates the time of the busiest SM, in a unit that is the same for all tiles. The values of
// leftpad, key_start and key_end are unknown here. If `packed` is true, the estimate assumes packed
// documents of kDocument tokens.
inline double attention_sm90_cost(const AttentionProblem& p, const AttentionSm90Tile& tile) {
  // The start and the end of a work tile together take as long as kEmptyKeys keys.
  constexpr double kEmptyKeys = 224;
  constexpr int64_t kDocument = 512;
  const int64_t documents =
      p.load.packed ? std::max<int64_t>(1, divide_up(p.seqlen_q, kDocument)) : 1;
  const int64_t seqlen_q = divide_up(p.seqlen_q, documents),
                seqlen_k = divide_up(p.seqlen_k, documents), heads = p.load.heads * documents;
  const int64_t tiles = divide_up(seqlen_q, tile.rows());
  double keys = 0, max_keys = 0;  // the sum and the maximum of the costs of a head's tiles
  const auto tile_cost = [&](int64_t seen) {
    const double cost = static_cast<double>(divide_up(seen, tile.keys) * tile.keys) + kEmptyKeys;
    max_keys = std::max(max_keys, cost);
    return cost;
  };
  // The estimate visits at most kCounted tiles of a head. If a head has more tiles, the estimate
  // samples them.
  constexpr int64_t kCounted = 64;
  const int64_t window = p.load.window, before = seqlen_k - seqlen_q;
  const bool uneven = p.load.causal || window > 0;
  const int64_t stride = uneven ? divide_up(tiles, kCounted) : tiles;
  for (int64_t first = 0; first < tiles; first += stride) {
    const int64_t end_row = std::min(tiles, first + stride) * tile.rows() + before;
    const int64_t begin = window > 0 ? end_row - tile.rows() - window + 1 : 0;
    const int64_t end = p.load.causal ? end_row : window > 0 ? end_row + window - 1 : seqlen_k;
    const auto clamp = [&](int64_t key) { return std::clamp<int64_t>(key, 0, seqlen_k); };
    const int64_t seen = clamp(end) - clamp(begin);
    keys += tile_cost(seen) * static_cast<double>(std::min(tiles - first, stride));
  }
  // The blocks of an SM share its throughput.
  const int64_t blocks = std::max<int64_t>(1, p.device.sms) * tile.blocks;
  const double rounds = static_cast<double>(divide_up(heads * tiles, blocks));
  const double even = keys * static_cast<double>(heads) / static_cast<double>(blocks);
  const double busiest = uneven ? std::max(max_keys, even) : rounds * max_keys;
  return busiest * tile.blocks * tile.rows() * (tile.dim + tile.dim_v) / tile.speed;
}

// The bytes of shared memory that the decode kernel needs in addition to its tile.
inline constexpr int kAttentionDecodeExtraBytes = 4 * 1024;

// The number of groups. A group is a tile of packed query rows of one kv head. If the keys are not
// split, each group has one block.
inline int64_t attention_decode_groups(const AttentionProblem& p) {
  return p.load.heads / p.load.group *
         divide_up(p.load.group * p.seqlen_q, AttentionDecodeTile::kRows);
}

inline Refusal attention_decode_refusal(const AttentionProblem& p, const AttentionDecodeTile& tile,
                                        int splits) {
  if (p.math != AttentionMath::k16Bit) return kAttentionOtherDtype;
  if (p.invariant) return kAttentionOtherKeys;
  if (const Refusal reason = attention_extras_refusal(p, false, false, /*alibi=*/true))
    return reason;
  if (p.seqlen_q > AttentionDecodeTile::kMaxSeqlenQ) {
    return {"the tile is for sequences of at most {} query rows", AttentionDecodeTile::kMaxSeqlenQ};
  }
  if (const Refusal reason = attention_sizes_refusal(p, tile.dim)) return reason;
  if (tile.tile_bytes() + kAttentionDecodeExtraBytes > p.device.shared_limit) {
    return too_much_shared_memory(tile.tile_bytes(), p.device.shared_limit);
  }
  if (splits < 1 || splits > AttentionDecodeTile::kMaxSplits) {
    return {"keys can be divided into 1 to {} splits", AttentionDecodeTile::kMaxSplits};
  }
  if (!grid_fits(static_cast<double>(p.load.group) * static_cast<double>(p.seqlen_q))) {
    return "more than 2^31 - 1 query rows of a kv head";
  }
  return grid_fits(static_cast<double>(attention_decode_groups(p)) * splits)
             ? Refusal()
             : "more than 2^31 - 1 blocks";
}

// Returns the number of splits for which the grid has about one block per SM. Each block has at
// least kMinSteps steps of the loop over the keys. More splits would only cost more partial sums.
inline int attention_decode_splits(const AttentionProblem& p, const AttentionDecodeTile& tile) {
  constexpr int64_t kMinSteps = 2;
  const int64_t groups = std::max<int64_t>(1, attention_decode_groups(p));
  const int64_t steps = divide_up(p.seqlen_k, tile.step_keys());
  const int64_t max_splits = std::min<int64_t>(AttentionDecodeTile::kMaxSplits, steps / kMinSteps);
  return static_cast<int>(std::max<int64_t>(1, std::min(p.device.sms / groups, max_splits)));
}

inline constexpr const char* kAttentionOnlyInvariant = "the kernel is for the batch-invariant mode";

// The bytes of memory between the kernels of the chain engine (ChainMemory): for one step of `keys`
// keys of a group, and for the last maxima of a group.
constexpr int attention_chain_step_bytes(int keys) { return (keys / 16 + 1) * 32 * 16; }
inline constexpr int kAttentionChainGroupBytes = 32 * 8;

// The number of columns of V of a warp of the chain engine, and the number of groups of columns.
inline constexpr int kAttentionChainColumns = 16;
constexpr int attention_chain_columns(int64_t head_dim_v) {
  return static_cast<int>(divide_up(head_dim_v, kAttentionChainColumns));
}

// Returns the number of steps of a group of the chain engine, `keys` keys each.
inline int attention_chain_steps(const AttentionProblem& p, int tile) {
  return static_cast<int>(divide_up(p.seqlen_k, kAttentionSm90Tiles[tile].masked_keys()));
}

// `tile` is an index into kAttentionSm90Tiles.
inline Refusal attention_chain_refusal(const AttentionProblem& p, int tile) {
  if (!p.invariant) return kAttentionOnlyInvariant;
  if (p.seqlen_q > AttentionDecodeTile::kMaxSeqlenQ) {
    return {"the kernel is for sequences of at most {} query rows",
            AttentionDecodeTile::kMaxSeqlenQ};
  }
  if (p.load.softcap) return "the kernel has no soft cap";
  if (p.load.packed && p.seqlen_q > 1) {
    return "the kernel has one key_start and one key_end per sequence";
  }
  if (const Refusal reason = attention_extras_refusal(p)) return reason;
  if (const Refusal reason = attention_sm90_refusal(p, kAttentionSm90Tiles[tile])) return reason;
  if (tile != attention_invariant_tile(p)) return kAttentionOtherKeys;
  const double groups = static_cast<double>(attention_decode_groups(p));
  const int steps = attention_chain_steps(p, tile), columns = attention_chain_columns(p.head_dim_v);
  return grid_fits(groups * std::max(steps, columns)) ? Refusal() : "more than 2^31 - 1 blocks";
}

inline AttentionChoice choose_attention(const AttentionProblem& p) {
  for (int i = 0; i < kNumAttentionDecodeTiles; ++i) {
    const AttentionDecodeTile& tile = kAttentionDecodeTiles[i];
    if (attention_decode_refusal(p, tile, 1)) continue;
    return {AttentionEngine::kDecode, i, attention_decode_splits(p, tile)};
  }
  int fastest = -1;
  double min_cost = 0;
  const int invariant_tile = p.invariant ? attention_invariant_tile(p) : -1;
  // NOTE: with many kv heads, tiles of 64 rows are faster, if they hold the rows of all query
  // heads.
  const bool one_read = p.load.group == 1 || p.load.packable;
  const bool few = attention_decode_groups(p) <= p.device.sms / 4;
  if (invariant_tile >= 0 && (few || !one_read) && !attention_chain_refusal(p, invariant_tile)) {
    return {AttentionEngine::kChain, invariant_tile, attention_chain_steps(p, invariant_tile)};
  }
  for (int i = 0; i < kNumAttentionSm90Tiles; ++i) {
    if (attention_sm90_refusal(p, kAttentionSm90Tiles[i])) continue;
    if (invariant_tile >= 0 &&
        attention_invariant_refusal(p, kAttentionSm90Tiles[i], invariant_tile)) {
      continue;
    }
    const double cost = attention_sm90_cost(p, kAttentionSm90Tiles[i]);
    if (fastest < 0 || cost < min_cost) fastest = i, min_cost = cost;
  }
  if (fastest >= 0) return {AttentionEngine::kSm90, fastest};
  if (!attention_wide_refusal(p, 1)) {
    return {AttentionEngine::kWide, 0, attention_wide_splits(p)};
  }
  for (int i = 0; i < kNumAttentionTiles; ++i) {
    if (!attention_refusal(p, kAttentionTiles[i])) return {AttentionEngine::kSync, i};
  }
  return {AttentionEngine::kGeneral, 0};
}

}  // namespace torchweld
