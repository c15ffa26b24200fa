// What the loaders of the kernels on tensor cores are made of: a block's work, and a thread's
// copies of x and of scales from global memory into a stage of the ring.
#pragma once

#include "core/fast_divide.h"
#include "device/mma_sync.cuh"
#include "int4/params.h"

namespace torchweld {

// Which tile of y and part of K a work tile is.
struct Int4WorkTile {
  int64_t first_row, first_token;  // of the weight, of x
  int first_chunk, chunk_end;      // of K
  int part;

  // Work tiles walk bands of kBandTokens tokens, so that those in flight share operands in L2. The
  // parts of a tile are neighbours: they make a cluster.
  static constexpr int kBandTokens = 2048;

  template <typename Tile>
  __device__ __forceinline__ Int4WorkTile(const Int4LinearParams& p, const Tile& tile,
                                          uint32_t item) {
    const uint32_t parts = p.choice.parts, index = item / parts;
    part = static_cast<int>(item % parts);
    const uint32_t tiles_n = static_cast<uint32_t>((p.gemm.n + tile.rows - 1) / tile.rows);
    const uint32_t tiles_m = static_cast<uint32_t>((p.gemm.m + tile.tokens - 1) / tile.tokens);
    const uint32_t most = kBandTokens / tile.tokens;
    const uint32_t band = index / (most * tiles_n), in_band = index % (most * tiles_n);
    const uint32_t height = min(most, tiles_m - band * most);
    first_token = int64_t{band * most + in_band % height} * tile.tokens;
    first_row = int64_t{in_band / height} * tile.rows;
    first_chunk = part * static_cast<int>(p.choice.part_chunks);
    chunk_end =
        static_cast<int>(min(p.weight.shape.chunks(), int64_t{first_chunk} + p.choice.part_chunks));
  }

  __device__ __forceinline__ int chunks() const { return chunk_end - first_chunk; }
  // Of the weight's tiles and x's tokens that the work tile may have, those that there are.
  __device__ __forceinline__ int tiles_left(const Int4LinearParams& p, int tiles) const {
    return static_cast<int>(
        min(int64_t{tiles}, p.weight.shape.tiles() - first_row / kInt4TileRows));
  }
  __device__ __forceinline__ int tokens_left(const Int4LinearParams& p, int tokens) const {
    return static_cast<int>(min(int64_t{tokens}, p.gemm.m - first_token));
  }
};

// A thread's copies of x in a step, which is [chunk][token][64 columns] of lines; of 16 bits
// 16-byte piece c of token r lies at c ^ (r % 8). Lines of x are the tokens of the first chunk,
// then those of the next.
template <const auto& kTiles, int kTile, int kElem, int kLineBytes = kInt4ChunkK * kElem>
class Int4XCopies {
  static constexpr auto kT = kTiles[kTile];
  static constexpr int kChunkBytes = kInt4ChunkK * kElem, kPieces = kChunkBytes / 16;
  static constexpr int kLineStep = kT.threads() / kPieces;
  static constexpr int kLoads = kT.chunks * kT.tokens / kLineStep;
  static constexpr int kTokenLoads = kT.tokens > kLineStep ? kT.tokens / kLineStep : 1;
  static constexpr int kChunkStep = kT.tokens > kLineStep ? 1 : kLineStep / kT.tokens;
  static_assert(kLoads >= 1 && kLoads * kLineStep == kT.chunks * kT.tokens);
  static_assert(kLoads % kTokenLoads == 0 && kTokenLoads <= 32);
  static_assert(kElem == 4 || kLineStep % 8 == 0);  // the swizzle is that of the first line

 public:
  // x from the work tile's first token and chunk on; `tokens_left` are there. s_x: x in a stage.
  __device__ __forceinline__ Int4XCopies(const char* g_x, int64_t row_bytes, int tokens_left,
                                         uint32_t s_x, int thread)
      : token_bytes_(kLineStep * row_bytes) {
    const int line = thread / kPieces, piece = thread % kPieces, token = line % kT.tokens;
    chunk_ = line / kT.tokens;
    g_x_ = g_x + token * row_bytes + chunk_ * kChunkBytes + piece * 16;
    s_x_ = s_x + line * kLineBytes + (kElem == 2 ? piece ^ (line & 7) : piece) * 16;
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      there_ |= uint32_t(token + i * kLineStep < tokens_left) << i;
    }
    // NOTE: without this the comparisons above are repeated in every step.
    asm volatile("" : "+r"(there_));
  }

  // Of a step, the chunk of the thread's first load.
  __device__ __forceinline__ int first_chunk() const { return chunk_; }

  // The next step; there(i): does the part have chunk first_chunk() + i of it? What is not there
  // becomes 0.
  template <typename There>
  __device__ __forceinline__ void load(uint32_t s_stage, const There& there) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = i % kTokenLoads, chunk = i / kTokenLoads * kChunkStep;
      copy_async_16_if(s_stage + s_x_ + i * (kLineStep * kLineBytes),
                       g_x_ + token * token_bytes_ + chunk * kChunkBytes,
                       (there_ >> token & 1) && there(chunk));
    }
    g_x_ += kT.chunks * kChunkBytes;
  }

 private:
  const char* g_x_;
  int64_t token_bytes_;  // from one of the thread's loads to the next
  int chunk_;
  uint32_t there_ = 0;  // a bit for each of the thread's loads
  uint32_t s_x_;
};

// A thread's copy of 16-bit scales or zeros in a step, which lie [tile][chunk]: 16 bytes of
// scales, the other 16, or 8 of zeros, each by one thread.
template <int kChunks>
class Int4ScaleCopy {
 public:
  static constexpr int kPieces = 3;  // a place's

  // Of `tile` of the weight, if it is there, and a chunk of the step. s_scale: their place.
  __device__ __forceinline__ Int4ScaleCopy(const char* g_scale, const char* g_zero, int64_t groups,
                                           int64_t tile, bool there, int chunk, int piece,
                                           uint32_t s_scale)
      : chunk_(chunk),
        bytes_(there ? 16 : 0),
        s_scale_(s_scale + piece * 16),
        is_zero_(piece == kPieces - 1) {
    const int64_t first_group = tile * groups;
    g_scale_ = is_zero_ ? g_zero + first_group * 8 : g_scale + first_group * 32 + piece * 16;
  }

  // The step from first_chunk of K on, of which the part has chunks_left.
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
