// From global memory into the ring: a step's weights, rows of x, scales and zeros.
//
// A stage holds, one after the other,
//   weights  [tile of 16 rows][chunk][lane] 16 bytes, as the repacked layout has them
//   x        [chunk][token][column]; 16-bit: 16-byte piece c of token r lies at c ^ (r % 8)
//   scales   [tile][chunk][16], zeros [tile][chunk] two words; not where groups are no whole chunks
#pragma once

#include "core/fast_divide.h"
#include "device/mma_sync.cuh"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

// Which tile of y and part of K a block has.
struct Int4Work {
  int64_t first_row, first_token;  // of the weight, of x
  int64_t first_chunk, chunk_end;  // of K
  int part;

  // Blocks walk bands of kBandTokens tokens, so that those in flight share operands in L2. The
  // parts of a tile are neighbours: they make a cluster.
  static constexpr int kBandTokens = 2048;

  __device__ __forceinline__ Int4Work(const Int4LinearParams& p, const Int4Tile& tile) {
    const int64_t parts = p.choice.parts, index = blockIdx.x / parts;
    part = static_cast<int>(blockIdx.x % parts);
    const int64_t tiles_n = (p.gemm.n + tile.rows - 1) / tile.rows;
    const int64_t tiles_m = (p.gemm.m + tile.tokens - 1) / tile.tokens;
    const int64_t most = kBandTokens / tile.tokens;
    const int64_t band = index / (most * tiles_n), in_band = index % (most * tiles_n);
    const int64_t height = min(most, tiles_m - band * most);
    first_token = (band * most + in_band % height) * tile.tokens;
    first_row = in_band / height * tile.rows;
    first_chunk = part * p.choice.part_chunks;
    chunk_end = min(p.weight.shape.chunks(), first_chunk + p.choice.part_chunks);
  }
};

template <typename T, int kTile, bool kWholeChunks>
class Int4Loader {
  static constexpr Int4Tile kT = kInt4Tiles[kTile];
  static constexpr int kThreads = kT.threads(), kElem = sizeof(T);
  // A tile's chunks of a step lie together: kTilePieces pieces of 16 bytes.
  static constexpr int kTilePieces = kT.chunks * 32;
  static constexpr int kTileStep = kThreads / kTilePieces;
  static constexpr int kWeightLoads = kT.row_tiles() / kTileStep;
  // Lines of x: the tokens of the first chunk, then those of the next.
  static constexpr int kLinePieces = kInt4ChunkK * kElem / 16;
  static constexpr int kLineStep = kThreads / kLinePieces;
  static constexpr int kXLoads = kT.chunks * kT.tokens / kLineStep;
  static constexpr int kTokenLoads = kT.tokens > kLineStep ? kT.tokens / kLineStep : 1;
  static constexpr int kChunkStep = kT.tokens > kLineStep ? 1 : kLineStep / kT.tokens;
  static constexpr int kChunkBytes = kInt4ChunkWords * 4, kXChunkBytes = kInt4ChunkK * kElem;
  // Pieces of 16 bytes of scales, and words of zeros, one a thread.
  static constexpr int kScaleLoads = kT.scale_bytes(kElem) / 16;
  static constexpr int kZeroLoads = kT.zero_bytes() / 4;
  static constexpr int kZeroThread = kThreads - kZeroLoads;
  static_assert(kThreads % kTilePieces == 0 && kT.row_tiles() % kTileStep == 0);
  static_assert(kXLoads >= 1 && kXLoads % kTokenLoads == 0);
  static_assert(kElem == 4 || kLineStep % 8 == 0);  // the swizzle is that of the first line
  static_assert(kScaleLoads <= kZeroThread);

 public:
  static constexpr int kScaleAt = kT.weight_bytes() + kT.x_bytes(kElem);
  static constexpr int kZeroAt = kScaleAt + kT.scale_bytes(kElem);

  __device__ __forceinline__ Int4Loader(const Int4LinearParams& p, const Int4Work& work, int thread)
      : chunk_(static_cast<int>(work.first_chunk)),
        chunks_left_(static_cast<int>(work.chunk_end - work.first_chunk)) {
    const Int4Weight& weight = p.weight;
    const int64_t first_tile = work.first_row / kInt4TileRows;
    // Of the weight's and x's rows that the block may have; the rest is zero.
    const int tiles_left =
        static_cast<int>(min(int64_t{kT.row_tiles()}, weight.shape.tiles() - first_tile));
    const int tokens_left = static_cast<int>(min(int64_t{kT.tokens}, p.gemm.m - work.first_token));

    const int tile = thread / kTilePieces, piece = thread % kTilePieces;
    tile_bytes_ = kTileStep * weight.shape.chunks() * kChunkBytes;
    g_weight_ = reinterpret_cast<const char*>(weight.packed) +
                ((first_tile + tile) * weight.shape.chunks() + work.first_chunk) * kChunkBytes +
                piece * 16;
    weight_chunk_ = piece / 32;
#pragma unroll
    for (int i = 0; i < kWeightLoads; ++i) {
      tile_bytes_there_[i] = tile + i * kTileStep < tiles_left ? 16 : 0;
    }

    const int line = thread / kLinePieces, x_piece = thread % kLinePieces;
    const int token = line % kT.tokens, chunk = line / kT.tokens;
    const int64_t row_bytes = p.gemm.a.row_stride * kElem;
    token_bytes_ = kLineStep * row_bytes;
    g_x_ = static_cast<const char*>(p.gemm.a.data) + (work.first_token + token) * row_bytes +
           (work.first_chunk + chunk) * kXChunkBytes + x_piece * 16;
    const int64_t unit_end = min(weight.shape.units(), work.chunk_end * kInt4ChunkUnits);
    units_left_ = static_cast<int>(unit_end - (work.first_chunk + chunk) * kInt4ChunkUnits) -
                  x_piece * kInt4ChunkUnits / kLinePieces;
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      token_there_ |= uint32_t(token + i * kLineStep < tokens_left) << i;
    }
    // NOTE: without this the comparisons above are repeated in every step, in 64 bits.
    asm volatile("" : "+r"(token_there_));
    const int at = kElem == 2 ? x_piece ^ (line & 7) : x_piece;
    s_x_ = kT.weight_bytes() + line * kT.x_row_bytes(kElem) + at * 16;

    if constexpr (kWholeChunks) find_scales(weight, first_tile, tiles_left, thread);
  }

  // The next step into a stage of the ring.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    // NOTE: a step of one chunk is always there. The number of bytes costs no predicate.
    const bool chunk_there = kT.chunks == 1 || weight_chunk_ < chunks_left_;
#pragma unroll
    for (int i = 0; i < kWeightLoads; ++i) {
      copy_async_16(s_stage + (thread + i * kThreads) * 16, g_weight_ + i * tile_bytes_,
                    chunk_there ? tile_bytes_there_[i] : 0);
    }
#pragma unroll
    for (int i = 0; i < kXLoads; ++i) {
      constexpr int kStep = kLineStep * kT.x_row_bytes(kElem);
      const int token = i % kTokenLoads, chunk = i / kTokenLoads * kChunkStep;
      copy_async_16_if(s_stage + s_x_ + i * kStep,
                       g_x_ + token * token_bytes_ + chunk * kXChunkBytes,
                       x_there(chunk) && (token_there_ >> token & 1));
    }
    if constexpr (kWholeChunks) load_scales(s_stage, group_chunks);
    g_weight_ += kT.chunks * kChunkBytes;
    g_x_ += kT.chunks * kXChunkBytes;
    units_left_ -= kT.chunks * kInt4ChunkUnits;
    chunks_left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  // Does this thread's piece of x, `chunk` chunks on, belong to the part?
  __device__ __forceinline__ bool x_there(int chunk) const {
    return (kWholeChunks && kT.chunks == 1) || units_left_ > chunk * kInt4ChunkUnits;
  }

  __device__ __forceinline__ void find_scales(const Int4Weight& weight, int64_t first_tile,
                                              int tiles_left, int thread) {
    const int word = thread - kZeroThread;  // of the zeros
    const int place = word >= 0 ? word / 2 : thread / kElem;
    const int tile = place / kT.chunks;
    scale_chunk_ = place % kT.chunks;
    is_zero_ = word >= 0;
    loads_scale_ = is_zero_ || thread < kScaleLoads;
    scale_there_ = tile < tiles_left;
    const int64_t first_group = (first_tile + tile) * weight.shape.groups;
    if (is_zero_) {
      g_scale_ = reinterpret_cast<const char*>(weight.zero + first_group * 2 + word % 2);
      s_scale_ = kZeroAt + word * 4;
    } else {
      g_scale_ = static_cast<const char*>(weight.scale) + first_group * (kInt4TileRows * kElem) +
                 thread % kElem * 16;
      s_scale_ = kScaleAt + thread * 16;
    }
  }

  __device__ __forceinline__ void load_scales(uint32_t s_stage, const FastDivisor& group_chunks) {
    if (!loads_scale_) return;
    // What is not there becomes 0, so that it adds nothing.
    const bool there = scale_there_ && (kT.chunks == 1 || scale_chunk_ < chunks_left_);
    const int64_t group = group_chunks.divide(static_cast<uint32_t>(chunk_ + scale_chunk_));
    if (is_zero_) {
      copy_async_4(s_stage + s_scale_, g_scale_ + group * 8, there ? 4 : 0);
    } else {
      copy_async_16(s_stage + s_scale_, g_scale_ + group * (kInt4TileRows * kElem), there ? 16 : 0);
    }
  }

  const char *g_weight_, *g_x_, *g_scale_ = nullptr;
  int64_t tile_bytes_, token_bytes_;  // from one of the thread's loads to the next
  int chunk_, chunks_left_;           // of the next step
  int units_left_;                    // of this thread's piece of x
  int weight_chunk_, scale_chunk_ = 0;
  int tile_bytes_there_[kWeightLoads];
  uint32_t token_there_ = 0;
  uint32_t s_x_, s_scale_ = 0;
  bool loads_scale_ = false, scale_there_ = false, is_zero_ = false;
};

}  // namespace torchweld
