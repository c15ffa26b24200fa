// The building blocks of the loaders in the tensor-core kernels: the work tile of a block, and a
// thread's cp.async copies of x and of the scales into a stage of the ring.
#pragma once

#include "core/fast_divide.h"
#include "device/mma_sync.cuh"
#include "int4/params.h"

namespace torchweld {

// The work of a block: a tile of y and one split of K.
struct Int4WorkTile {
  // The first weight row and the first row of x (token) of the block's tile.
  int64_t first_row, first_token;
  int first_chunk, chunk_end;  // the range of chunks of K that the block multiplies
  int split;

  // Work tiles are ordered by bands of kBandTokens tokens. Tiles that run at the same time then
  // share operands in L2. The splits of a tile have consecutive indices, so that they form a
  // cluster.
  static constexpr int kBandTokens = 2048;

  template <typename Tile>
  __device__ __forceinline__ Int4WorkTile(const Int4LinearParams& p, const Tile& tile,
                                          uint32_t item) {
    const uint32_t splits = p.choice.splits, index = item / splits;
    split = static_cast<int>(item % splits);
    const uint32_t tiles_n = static_cast<uint32_t>((p.gemm.n + tile.rows - 1) / tile.rows);
    const uint32_t tiles_m = static_cast<uint32_t>((p.gemm.m + tile.tokens - 1) / tile.tokens);
    const uint32_t band_tiles = kBandTokens / tile.tokens;
    const uint32_t band = index / (band_tiles * tiles_n), in_band = index % (band_tiles * tiles_n);
    const uint32_t height = min(band_tiles, tiles_m - band * band_tiles);
    first_token = int64_t{band * band_tiles + in_band % height} * tile.tokens;
    first_row = int64_t{in_band / height} * tile.rows;
    first_chunk = split * static_cast<int>(p.choice.split_chunks);
    chunk_end = static_cast<int>(
        min(p.weight.shape.chunks(), int64_t{first_chunk} + p.choice.split_chunks));
  }

  __device__ __forceinline__ int chunks() const { return chunk_end - first_chunk; }
  // tiles_left() is the number of row tiles of the weight from first_row on, but at most `tiles`.
  // tokens_left() is the number of tokens of x from first_token on, but at most `tokens`.
  __device__ __forceinline__ int tiles_left(const Int4LinearParams& p, int tiles) const {
    return static_cast<int>(
        min(int64_t{tiles}, p.weight.shape.tiles() - first_row / kInt4TileRows));
  }
  __device__ __forceinline__ int tokens_left(const Int4LinearParams& p, int tokens) const {
    return static_cast<int>(min(int64_t{tokens}, p.gemm.m - first_token));
  }
};

// A thread's copies of x for one k-block. The k-block is stored as [chunk][token][64 columns]. A
// row holds the 64 columns of one token in one chunk. For 16-bit x, 16-byte vector c of token r is
// stored at index c ^ (r % 8) of the row.
template <const auto& kTiles, int kTile, int kElem, int kRowBytes = kInt4ChunkK * kElem>
class Int4XCopies {
  static constexpr auto kT = kTiles[kTile];
  static constexpr int kChunkBytes = kInt4ChunkK * kElem, kVectors = kChunkBytes / 16;
  static constexpr int kRowStep = kT.threads() / kVectors;
  static constexpr int kLoads = kT.chunks * kT.tokens / kRowStep;
  static constexpr int kTokenLoads = kT.tokens > kRowStep ? kT.tokens / kRowStep : 1;
  static constexpr int kChunkStep = kT.tokens > kRowStep ? 1 : kRowStep / kT.tokens;
  static_assert(kLoads >= 1 && kLoads * kRowStep == kT.chunks * kT.tokens);
  static_assert(kLoads % kTokenLoads == 0 && kTokenLoads <= 32);
  static_assert(kElem == 4 || kRowStep % 8 == 0);  // all rows of a thread have the same swizzle

 public:
  // g_x points to the first token and the first chunk of the work tile. tokens_left is the number
  // of tokens that x has from the first token on. s_x is the offset of x in a stage.
  __device__ __forceinline__ Int4XCopies(const char* g_x, int64_t row_bytes, int tokens_left,
                                         uint32_t s_x, int thread)
      : token_stride_(kRowStep * row_bytes) {
    const int row = thread / kVectors, vector = thread % kVectors, token = row % kT.tokens;
    chunk_ = row / kT.tokens;
    g_x_ = g_x + token * row_bytes + chunk_ * kChunkBytes + vector * 16;
    s_x_ = s_x + row * kRowBytes + (kElem == 2 ? vector ^ (row & 7) : vector) * 16;
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      valid_ |= uint32_t(token + i * kRowStep < tokens_left) << i;
    }
    // NOTE: without this asm the compiler would repeat the comparisons above in every k-block.
    asm volatile("" : "+r"(valid_));
  }

  // The index (within the k-block) of the first chunk that the thread loads.
  __device__ __forceinline__ int first_chunk() const { return chunk_; }

  // Loads the next k-block. valid(i) must return whether the chunk with index first_chunk() + i in
  // the k-block lies in the split. Chunks outside of the split become 0.
  template <typename Valid>
  __device__ __forceinline__ void load(uint32_t s_stage, const Valid& valid) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = i % kTokenLoads, chunk = i / kTokenLoads * kChunkStep;
      copy_async_16_if(s_stage + s_x_ + i * (kRowStep * kRowBytes),
                       g_x_ + token * token_stride_ + chunk * kChunkBytes,
                       (valid_ >> token & 1) && valid(chunk));
    }
    g_x_ += kT.chunks * kChunkBytes;
  }

 private:
  const char* g_x_;
  int64_t token_stride_;  // distance in x between the tokens of consecutive loads, in bytes
  int chunk_;
  uint32_t valid_ = 0;  // bit i is set if the token of the thread's load i exists
  uint32_t s_x_;
};

// A thread's copy of scales or zeros for one k-block. The scales are 16-bit. Shared memory stores
// scales and zeros as [tile][chunk]. Three threads copy the scales and zeros of one chunk of a
// tile: two threads copy 16 bytes of scales each, and one thread copies 8 bytes of zeros.
template <int kChunks>
class Int4ScaleCopy {
 public:
  static constexpr int kCopies = 3;  // number of copies per chunk of a tile

  // `valid` is true if the weight has row tile `tile`. `chunk` is the index of the chunk in the
  // k-block. s_scale is the offset of the scales in a stage.
  __device__ __forceinline__ Int4ScaleCopy(const char* g_scale, const char* g_zero, int64_t groups,
                                           int64_t tile, bool valid, int chunk, int copy,
                                           uint32_t s_scale)
      : chunk_(chunk),
        bytes_(valid ? 16 : 0),
        s_scale_(s_scale + copy * 16),
        is_zero_(copy == kCopies - 1) {
    const int64_t first_group = tile * groups;
    g_scale_ = is_zero_ ? g_zero + first_group * 8 : g_scale + first_group * 32 + copy * 16;
  }

  // Loads the scales or zeros for the k-block that starts at chunk first_chunk of K. chunks_left is
  // the number of chunks that the split has from first_chunk on.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int first_chunk, int chunks_left) const {
    const int bytes = kChunks == 1 || chunk_ < chunks_left ? bytes_ : 0;
    const uint64_t group = group_chunks.divide(static_cast<uint32_t>(first_chunk + chunk_));
    if (is_zero_) {
      copy_async_8(s_stage + s_scale_, g_scale_ + group * 8, bytes / 2);
    } else {
      copy_async_16(s_stage + s_scale_, g_scale_ + group * 32, bytes);
    }
  }

 private:
  const char* g_scale_;
  int chunk_, bytes_;
  uint32_t s_scale_;
  bool is_zero_;
};

}  // namespace torchweld
