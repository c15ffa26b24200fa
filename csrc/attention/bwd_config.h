// Chooses the kernel and the tile of attention's backward. This is pure host code. Tests run it
// without a GPU, and `explain` prints the choice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/config.h"

namespace torchweld {

// Every warp has a counter for every query tile. The counters enforce the order in which blocks add
// to dQ. A query tile has at most one counter per kAttentionBackwardRowsPerCounter rows.
inline constexpr int kAttentionBackwardRowsPerCounter = 4;

// A block has `warps` warps and `keys` keys. It loops over the query rows, `rows` rows at a time.
// The keys are divided into strips of 16 keys. `groups` warps share a strip. Each of them computes
// the scores of the strip for `cols` query rows at a time. Each of them accumulates dV and dK of
// the strip for its own slice of the head dims. If `paired` is true, half of the warps compute P
// and accumulate dV, and the other half compute dS and accumulate dK. The warps that share a strip
// then also divide the query rows among themselves.
struct AttentionBackwardTile {
  AttentionMath math;
  int head_dim;  // the maximum of head_dim and head_dim_v
  int keys;
  int rows;
  int cols;
  int warps;
  int groups;
  int blocks_per_sm;
  // Whether a block may load the sums of dQ before it needs them. It loads them early only if all
  // earlier blocks have already added to these sums.
  bool prefetches;
  bool split;   // dV and dK have separate launches, because they don't fit in a warp's registers
  bool paired;  // whether different warps accumulate dV and dK

  constexpr int threads() const { return warps * 32; }
  constexpr int strip_warps() const { return paired ? warps / 2 : warps; }
  constexpr int strips() const { return keys * groups / (strip_warps() * 16); }
  // The size of shared memory in bytes. Shared memory holds K, V, two stages of Q and dO, and two
  // buffers of dS. In fp32, Q and dO each have a buffer of bf16 terms and a buffer of fp32 values,
  // and dS has one buffer. Paired warps also need a buffer of P. The last 16 * rows + 128 bytes
  // hold two stages of lse and delta, and the work tile.
  constexpr int shared_bytes() const {
    const int size = elem_size(math);
    const int tiles =
        math == AttentionMath::kFloat32
            ? kBf16x3Bytes * (2 * keys * head_dim + 2 * rows * head_dim + keys * rows) +
                  size * 2 * rows * head_dim
            : size * (2 * keys * head_dim + 4 * rows * head_dim + (paired ? 3 : 2) * keys * rows);
    return tiles + 16 * rows + 128;
  }
  // The number of accumulators per thread for dV and dK of a warp's strips. In a split or paired
  // tile, a warp has accumulators for only one of dV and dK.
  constexpr int sum_registers() const {
    return (split || paired ? 1 : 2) * strips() * head_dim / groups / 2;
  }
  // The number of accumulators per thread for a warp's slice of a dQ tile.
  constexpr int dq_registers() const { return rows * head_dim / threads(); }
  constexpr bool valid() const {
    return keys * groups == strips() * strip_warps() * 16 && rows % cols == 0 && cols % 16 == 0 &&
           (!paired || (cols * groups == rows && math == AttentionMath::k16Bit && !split)) &&
           64 % rows == 0 && sum_registers() <= 128 && dq_registers() <= 64 &&
           warps * kAttentionBackwardRowsPerCounter <= rows;
  }
};

// The tiles in order of preference. The first legal tile is chosen. The smaller tiles are for
// devices with 99 KB of shared memory per block. For head dims above 128 there are no TF32 tiles,
// so TF32 calls use the fp32 tiles.
inline constexpr AttentionBackwardTile kAttentionBackwardTiles[] = {
    {AttentionMath::k16Bit, 64, 128, 64, 32, 4, 1, 2, false, false, false},
    {AttentionMath::k16Bit, 128, 128, 64, 64, 8, 1, 1, true, false, true},
    {AttentionMath::k16Bit, 128, 128, 64, 64, 8, 1, 1, true, false, false},
    {AttentionMath::k16Bit, 128, 64, 32, 32, 4, 1, 1, true, false, false},
    {AttentionMath::k16Bit, 256, 64, 64, 32, 8, 2, 1, false, false, true},
    {AttentionMath::k16Bit, 256, 64, 32, 16, 8, 2, 1, true, false, true},
    {AttentionMath::k16Bit, 256, 32, 16, 16, 2, 1, 1, false, true, false},
    {AttentionMath::kTf32, 64, 64, 32, 16, 4, 1, 2, false, true, false},
    {AttentionMath::kTf32, 128, 64, 32, 16, 4, 1, 1, false, true, false},
    {AttentionMath::kTf32, 128, 32, 16, 16, 2, 1, 1, false, true, false},
    {AttentionMath::kFloat32, 64, 128, 32, 32, 8, 1, 1, false, false, false},
    {AttentionMath::kFloat32, 64, 64, 16, 16, 4, 1, 1, false, false, false},
    {AttentionMath::kFloat32, 128, 64, 32, 32, 8, 2, 1, false, false, false},
    {AttentionMath::kFloat32, 128, 32, 16, 16, 4, 2, 1, false, false, false},
    {AttentionMath::kFloat32, 256, 32, 16, 16, 4, 2, 1, false, false, false}};
inline constexpr int kNumAttentionBackwardTiles =
    sizeof(kAttentionBackwardTiles) / sizeof(kAttentionBackwardTiles[0]);

// A tile of Hopper's kernels. Each of two consumer warpgroups has 64 keys of the block. Both loop
// over the query rows, `rows` rows at a time, with two stages of Q and dO. One warp loads tiles,
// and other warps add to dQ. Head dims below `dim` are padded with zeros. Under a general mask, a
// query tile has only kMaskedRows rows, the rows of one group (kAttentionBackwardRowPad). A smaller
// tile leaves registers for the mask.
//
// For the largest head dims, two CTAs of a cluster process the same query tiles
// (attention/sm90/bwd_2cta_consumer.cuh). Both warpgroups of a CTA have the same 64 keys. Each
// warpgroup computes half of the rows of S and half of the columns of dK and dV. Each CTA computes
// half of the columns of dQ.
struct AttentionBackwardSm90Tile {
  int dim;     // the columns of Q and K in shared memory
  int dim_v;   // the columns of V in shared memory
  int rows;    // the number of query rows
  int keys;    // the number of keys of a CTA
  int blocks;  // the number of CTAs in a cluster
  int used;    // the columns that the products read or compute, except dQ's; at most dim

  static constexpr int kMaskedRows = 64, kStages = 2, kThreads = 384;
  static constexpr int kBoxColumns = AttentionSm90Tile::kBoxColumns;

  constexpr bool is_2cta() const { return blocks > 1; }
  // The largest head dim of V.
  constexpr int used_v() const { return used < dim_v ? used : dim_v; }
  // NOTE: under a soft cap, dS also needs the slope of tanh. A tile with more columns of dK than of
  // dV has no registers for it. A tile that does not use all columns leaves rare masks to the next
  // tile, so that the library has fewer kernels.
  constexpr bool supports_softcap() const { return dim_v == dim && used == dim; }
  // Whether the tile has kernels with dropout, with a bias and with ALiBi.
  constexpr bool supports_extras() const { return supports_softcap() && !is_2cta(); }
  // Whether a soft cap has a kernel of its own. Without a stat slice, the kernel for a general mask
  // also serves a soft cap.
  constexpr bool has_capped_kernel() const { return supports_softcap() && !is_2cta(); }
  // The number of dQ store warps. If there are two, they alternate over the query tiles. Each store
  // warp has its own buffer of dQ. There are as many buffers of dS as buffers of dQ.
  constexpr int dq_store_warps() const { return dim > 128 ? 1 : 2; }
  // Whether the products for S and dP have one more k-slice, which subtracts lse and delta of the
  // query rows (StatSliceTile). The k-slice has kStatSliceBytes bytes per query row. In a tile of
  // 128 rows, it does not fit in shared memory. Under a soft cap it can't be used, because tanh
  // must be applied to a score before lse is subtracted. With dropout or a bias it can't be used: a
  // dropped probability has no dP, but has delta, and a bias is added to the scaled score.
  static constexpr int kStatSliceBytes = 16;
  constexpr bool has_stat_slice(bool masked, bool capped, bool drops_or_biased) const {
    return !capped && !drops_or_biased && !is_2cta() && (masked ? kMaskedRows : rows) < 128;
  }
  // The number of stages of dO. With a bias, wide tiles have space for only one.
  constexpr int dout_stages(bool bias) const {
    return is_2cta() || (bias && dim > 64) ? 1 : kStages;
  }
  // The size of the tile in shared memory, in bytes. Shared memory holds K, V, two stages of Q and
  // dO, and the buffers of dS and of the fp32 dQ. In a 2-CTA tile, dO has only one stage, and the
  // buffer of dQ holds only half of the columns of dQ. A 2-CTA tile has two more buffers: one for
  // half of the peer's K, and one for P. The peer's dS later overwrites P.
  constexpr int tile_bytes() const {
    if (!is_2cta()) {
      return 2 * (keys + kStages * rows) * (dim + dim_v) +
             dq_store_warps() * (2 * rows * keys + 4 * rows * dim);
    }
    const int elems =
        keys * (dim + dim / 2 + dim_v) + rows * (kStages * dim + dim_v) + 2 * rows * keys;
    return 2 * elems + 2 * rows * dim;
  }
};

inline constexpr AttentionBackwardSm90Tile kAttentionBackwardSm90Tiles[] = {
    {64, 64, 128, 128, 1, 64},   {128, 128, 64, 128, 1, 80},  {128, 128, 64, 128, 1, 96},
    {128, 128, 64, 128, 1, 128}, {192, 128, 64, 128, 1, 192}, {256, 256, 64, 64, 2, 256}};
inline constexpr int kNumAttentionBackwardSm90Tiles =
    sizeof(kAttentionBackwardSm90Tiles) / sizeof(kAttentionBackwardSm90Tiles[0]);

// The bytes of shared memory that the kernel needs in addition to its tile.
inline constexpr int kAttentionBackwardSm90ExtraBytes = 3 * 1024;

// The number of query rows in a group. A group has one BlockMask. In scratch memory, the query rows
// are padded to whole groups. The number is a multiple of `rows` of every kSync tile.
inline constexpr int64_t kAttentionBackwardRowPad = 64;

// Returns the multiple to which the number of query rows is rounded up in scratch memory.
constexpr int64_t attention_backward_row_pad(const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kWide) return AttentionWideTile::kRows;
  return choice.engine == AttentionEngine::kSm90 ? kAttentionBackwardSm90Tiles[choice.tile].rows
                                                 : kAttentionBackwardRowPad;
}

// Returns the number of columns of the widest tiles that may process these head dims, or 0 if no
// tile supports them.
constexpr int64_t attention_backward_dq_columns(int64_t head_dim, int64_t head_dim_v) {
  const int64_t wide = head_dim > head_dim_v ? head_dim : head_dim_v;
  for (const int64_t columns : {64, 128, 256}) {
    if (wide <= columns) return columns;
  }
  return 0;
}

// Returns the number of columns of dQ, and of partial dK and dV, in scratch memory.
constexpr int64_t attention_backward_scratch_columns(const AttentionChoice& choice,
                                                     int64_t head_dim, int64_t head_dim_v) {
  return choice.engine == AttentionEngine::kSm90
             ? kAttentionBackwardSm90Tiles[choice.tile].dim
             : attention_backward_dq_columns(head_dim, head_dim_v);
}

inline Refusal attention_backward_refusal(const AttentionProblem& p,
                                          const AttentionBackwardTile& tile) {
  const bool serves = tile.math == p.math ||
                      (tile.math == AttentionMath::kFloat32 && p.math == AttentionMath::kTf32);
  if (!serves) return kAttentionOtherDtype;
  if (const Refusal reason = attention_extras_refusal(p)) return reason;
  // NOTE: a tile with more columns than dQ has in scratch memory would write beyond the array of
  // dQ.
  const int64_t wide = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (wide > tile.head_dim ||
      tile.head_dim > attention_backward_dq_columns(p.head_dim, p.head_dim_v)) {
    return {"the tile is for head dims of {} to {}", tile.head_dim / 2 + 1, tile.head_dim};
  }
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  // The tiled kernels have a one-dimensional grid, which limits the number of tiles. The general
  // kernels have no such limit, because they loop over any number of rows.
  const double kv_heads = static_cast<double>(p.load.heads) / static_cast<double>(p.load.group);
  const double blocks = kv_heads * (static_cast<double>(p.seqlen_k) / tile.keys + 1);
  return grid_fits(blocks) ? Refusal() : "more than 2^31 - 1 tiles";
}

inline Refusal attention_backward_sm90_refusal(const AttentionProblem& p,
                                               const AttentionBackwardSm90Tile& tile) {
  if (!p.device.wgmma || !p.device.tma) return kAttentionNoWgmma;
  if (p.math != AttentionMath::k16Bit) return kAttentionOtherDtype;
  const int64_t wide = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (wide > tile.used || tile.dim > attention_backward_dq_columns(p.head_dim, p.head_dim_v)) {
    return {"the tile is for head dims of {} to {}",
            tile.dim > 128 ? 129 : (tile.dim > 64 ? 65 : 1), tile.used};
  }
  if (p.head_dim_v > tile.used_v()) {
    return {"the tile supports head dims up to {} and {}", tile.used, tile.used_v()};
  }
  if (p.load.softcap && !tile.supports_softcap()) return "the tile supports no soft cap";
  if (const Refusal reason = attention_sizes_refusal(p)) return reason;
  const bool extras = tile.supports_extras();
  if (const Refusal reason = attention_extras_refusal(p, extras, extras, extras)) return reason;
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) {
    return "the rows of the results are not aligned to 16 bytes";
  }
  if (p.seqlen_q == 0) return "there are no query rows";
  if (p.seqlen_k == 0) return "there are no keys";
  const int bytes = tile.tile_bytes() + kAttentionBackwardSm90ExtraBytes;
  if (bytes > p.device.shared_limit) return too_much_shared_memory(bytes, p.device.shared_limit);
  // NOTE: the kernels count rows in 32 bits.
  const double heads = static_cast<double>(p.load.heads);
  const double rows = heads * static_cast<double>(divide_up(p.seqlen_q, tile.rows) * tile.rows);
  if (!grid_fits(rows)) return "more than 2^31 - 1 query rows";
  if (tile.blocks > 1 && !p.device.clusters) return "the device has no clusters";
  const int keys = tile.keys * tile.blocks;
  const double key_tiles = static_cast<double>(divide_up(p.seqlen_k, keys) * tile.blocks);
  return grid_fits(heads / static_cast<double>(p.load.group) * key_tiles)
             ? Refusal()
             : "more than 2^31 - 1 tiles";
}

inline Refusal attention_backward_wide_refusal(const AttentionProblem& p) {
  if (p.load.heads == 0) return "there are no query heads";
  if (const Refusal reason = attention_wide_refusal(p, 1)) return reason;
  if (const Refusal reason = attention_wide_refusal(p, p.load.heads / p.load.group, p.seqlen_k)) {
    return reason;
  }
  if (p.load.softcap) return "the tile supports no soft cap";
  if (p.head_dim % 8 != 0) return "the rows of the results are not aligned to 16 bytes";
  return p.seqlen_q == 0 ? "there are no query rows" : Refusal();
}

inline AttentionChoice choose_attention_backward(const AttentionProblem& p) {
  for (int i = 0; i < kNumAttentionBackwardSm90Tiles; ++i) {
    if (!attention_backward_sm90_refusal(p, kAttentionBackwardSm90Tiles[i])) {
      return {AttentionEngine::kSm90, i};
    }
  }
  if (!attention_backward_wide_refusal(p)) return {AttentionEngine::kWide, 0};
  for (int i = 0; i < kNumAttentionBackwardTiles; ++i) {
    if (!attention_backward_refusal(p, kAttentionBackwardTiles[i])) {
      return {AttentionEngine::kSync, i};
    }
  }
  return {AttentionEngine::kGeneral, 0};
}

// The number of keys that a block of Hopper's kernels processes. In the 2-CTA kernel, this is the
// number of keys that a cluster processes.
inline constexpr int64_t kAttentionBackwardSm90Keys = 128;

// A part of the query heads has a partial dK and a partial dV. Returns the number of 64-key tiles
// in each of these partials. The keys are rounded up to whole blocks.
TW_HOST_DEVICE constexpr int64_t attention_backward_part_tiles(int64_t seqlen_k) {
  return divide_up(seqlen_k, kAttentionBackwardSm90Keys) * (kAttentionBackwardSm90Keys / 64);
}

// The number of parts into which Hopper's kernels divide the query heads of a kv head. Each part
// has its own blocks. Without causal, the number is chosen so that each SM gets at most one block.
// With causal, each SM gets at most two blocks, and runs the longer block first. A part has at
// least kPartRows query rows on average. On 132 SMs, the partial dK and dV of the parts need up to
// 52 MB of fp32 scratch memory.
// Times on an H100 relative to one part, for (batch, nheads/nheads_kv, seqlen, head_dim):
//   (1, 32/1, 8192, 128) 0.28   (1, 28/4, 2048, 128) 0.41   (1, 32/8, 2048, 128) 0.73
constexpr int64_t attention_backward_group_parts(int64_t kv_heads, int64_t group, int64_t seqlen_q,
                                                 int64_t seqlen_k, int64_t wave, bool causal) {
  constexpr int64_t kPartRows = 512;
  const int64_t blocks = kv_heads * divide_up(seqlen_k, kAttentionBackwardSm90Keys);
  if (blocks == 0) return 1;
  const int64_t fitting = (causal ? 2 : 1) * wave / blocks;
  const int64_t max_parts = std::min({fitting, group * seqlen_q / kPartRows, group});
  if (max_parts < 2) return 1;
  const int64_t heads = divide_up(group, max_parts);  // number of query heads of the largest part
  return divide_up(group, heads);
}
static_assert(attention_backward_group_parts(1, 32, 8192, 8192, 132, true) == 4);
static_assert(attention_backward_group_parts(4, 7, 2048, 2048, 132, true) == 4);
static_assert(attention_backward_group_parts(4, 7, 2048, 2048, 132, false) == 2);
static_assert(attention_backward_group_parts(8, 8, 8192, 8192, 132, true) == 1);
static_assert(attention_backward_group_parts(1, 32, 1, 8192, 132, true) == 1);
static_assert(attention_backward_group_parts(0, 0, 8, 8, 132, true) == 1);

// The order of the blocks. It decides which data the blocks find in the L2 cache and how long the
// blocks wait to add to dQ.
//
// A wave is one block per SM. Under causal, the blocks of a wave start together and end one after
// the other. The blocks of the last keys end first. There are two ways to loop over the query
// tiles:
//   downwards only   The blocks of the next wave start one after the other, all with the last
//                    tile. They read the same tile at different times, so they share no loads.
//   alternating      Every second wave loops upwards. A block of such a wave that starts later
//                    also starts with a later tile. The blocks that started before it process
//                    the same tile at this time, so the blocks share loads. All blocks of such a
//                    wave end together, just when the next wave has to start.
// Alternating directions are faster if a kv head has many query heads. Times on an H100 relative to
// downwards only, in the notation of attention_backward_group_parts:
//   (1, 64/8, 8192, 128) 0.89   (4, 64/8, 2048, 128) 0.86   (8, 32/8, 2048, 128) 0.95
//   (1, 16/2, 8192, 256) 0.93   (1, 64/8, 8192, 64) 0.97
// If every kv head has only one query head, alternating directions take up to 1.2 times as long as
// downwards only.
struct AttentionBackwardOrder {
  int64_t at_once;  // the number of parts whose blocks run at the same time
  // Number of blocks between two changes of the loop direction; 0 if all blocks loop downwards.
  int64_t wave;
};

// The work of a call. A part is some of the query heads of a kv head. If
// attention_backward_group_parts() returns 1, a part is all query heads of a kv head.
struct AttentionBackwardLoad {
  int64_t parts;
  int64_t heads;  // number of query heads per part
  int64_t seqlen_k;
  int64_t columns;
  int64_t bytes;  // number of bytes that the blocks of a part read and write
  bool causal;    // true for any mask that gives blocks unequal work
};

// `wave` is the number of blocks or clusters that run at the same time. If `wave` is 0, all blocks
// must loop downwards.
constexpr AttentionBackwardOrder attention_backward_order(const AttentionBackwardLoad& load,
                                                          int64_t wave) {
  constexpr int64_t kCacheBytes = 32 << 20, kBlocks = 256, kMax = 64;
  const int64_t tiles = divide_up(load.seqlen_k, kAttentionBackwardSm90Keys);
  const int64_t columns = load.columns;
  if (wave > 0 && tiles > 0 && load.heads >= (columns > 64 ? 4 : 8)) {
    // Use an even number of waves: about as many as 16 parts need, but at least two. After an odd
    // number of waves, the blocks of the next parts would not start together. The call would then
    // need up to 1.18 times the time.
    const int64_t pairs = (16 * tiles + wave) / (2 * wave);
    const int64_t even = 2 * wave * std::max<int64_t>(pairs, 1) / tiles;
    if (load.parts * 2 <= even * 3) return {load.parts, wave};
    // The parts run in sets of about `even` parts. If the last set had only a few parts, most SMs
    // would be idle while it runs. Therefore the parts of such a last set are spread over the
    // earlier sets.
    const int64_t sets = load.parts / even, over = load.parts % even;
    return {over > 0 && over * 4 <= even ? divide_up(load.parts, sets) : even, wave};
  }
  // Run enough parts at the same time to fill all SMs, and more parts if their data fits in the L2
  // cache.
  // NOTE: if all blocks have equal work and long loops, the blocks of 16 heads drift apart, and
  // every block reads its query rows from memory instead of the cache. On an H100, (1, 16, 16384,
  // 128) took 12.5 ms and 18 GB of memory traffic with 16 heads at the same time, and 8.8 ms and
  // 4.4 GB with 8 heads.
  const int64_t min_parts =
      load.heads > 1 ? 4 : (columns > 128 || !load.causal ? 8 : (columns > 64 ? 16 : 32));
  const int64_t filling =
      std::clamp<int64_t>(tiles > 0 ? kBlocks / tiles : kMax, min_parts, columns > 64 ? 16 : kMax);
  const int64_t cached = load.bytes > 0 ? kCacheBytes / load.bytes : kMax;
  const int64_t about = std::clamp(cached, filling, kMax);
  const int64_t sets = (2 * load.parts + about) / (2 * about);
  return {divide_up(load.parts, std::max<int64_t>(sets, 1)), 0};
}
static_assert(attention_backward_order({8, 8, 8192, 128, 0, true}, 132).at_once == 8);
static_assert(attention_backward_order({64, 4, 2048, 128, 0, true}, 132).at_once == 16);
static_assert(attention_backward_order({33, 4, 8192, 128, 0, true}, 132).at_once == 17);
static_assert(attention_backward_order({96, 1, 1024, 64, 786432, true}, 132).at_once == 48);
static_assert(attention_backward_order({96, 1, 1024, 64, 786432, true}, 132).wave == 0);
static_assert(attention_backward_order({16, 1, 16384, 128, 25 << 20, false}, 0).at_once == 8);
static_assert(attention_backward_order({0, 1, 1024, 64, 0, true}, 132).at_once == 0);

// Whether the last CTA that adds to dQ of a query tile also rounds this dQ (attention/sm90/
// bwd_dq.cuh). Otherwise a kernel rounds all of dQ at the end. A dQ store warp needs the time of
// three steps of the mainloop to round a tile, so it should only do so if
//   - another store warp adds to other tiles at this time,
//   - every CTA is the last one for a few tiles: without a mask, the CTAs of the last keys would be
//     the last ones for all tiles,
//   - no CTA starts with these tiles, because the CTAs of later keys would wait for it.
// Times on an H100 relative to a kernel at the end, for causal (batch, nheads, seqlen, head_dim):
//   (4, 16, 4096, 128) 0.97   (16, 16, 512, 128) 0.94   (64, 16, 128, 128) 0.79
//   (2, 16, 8192, 128) with documents of 512 0.91, with a window of 1024 0.94
// If the conditions do not hold: (4, 16, 4096, 128) without a mask 1.05, (2, 32/8, 4096, 128) 1.22.
constexpr bool attention_backward_rounds_dq(const AttentionBackwardSm90Tile& tile,
                                            const AttentionBackwardLoad& load,
                                            const AttentionBackwardOrder& order) {
  return tile.dq_store_warps() > 1 && load.causal && order.wave == 0;
}
static_assert(attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[3],
                                           {64, 1, 4096, 128, 0, true}, {16, 0}));
static_assert(!attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[3],
                                            {64, 1, 4096, 128, 0, false}, {8, 0}));
static_assert(!attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[3],
                                            {16, 4, 4096, 128, 0, true}, {16, 132}));
static_assert(!attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[4],
                                            {64, 1, 4096, 192, 0, true}, {16, 0}));

}  // namespace torchweld
