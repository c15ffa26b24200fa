// From global memory into the ring of the kernel on products of warpgroups.
//
// A stage holds, one after the other,
//   weights  [tile of 16 rows][chunk][lane] 16 bytes, as the repacked layout has them
//   x        [chunk][token][64 columns]; 16-byte piece c of token r lies at c ^ (r % 8)
//   scales   [tile][chunk] 32 bytes of scales, 8 of zeros
// Weights, scales and zeros are copied by the warp that reads them.
#pragma once

#include "core/fast_divide.h"
#include "device/mma_sync.cuh"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

// Which tile of y and part of K an item of work is.
struct Int4WideWork {
  int64_t first_row, first_token;  // of the weight, of x
  int first_chunk, chunk_end;      // of K
  int part;

  // Items walk bands of kBandTokens tokens, so that those in flight share operands in L2. The parts
  // of a tile are neighbours: they make a cluster.
  static constexpr int kBandTokens = 2048;

  __device__ __forceinline__ Int4WideWork(const Int4LinearParams& p, const Int4WideTile& tile,
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
};

template <typename T, int kTile>
class Int4WideLoader {
  static constexpr Int4WideTile kT = kInt4WideTiles[kTile];
  static constexpr int kThreads = kT.threads();
  static constexpr int kChunkBytes = kInt4ChunkWords * 4, kXChunkBytes = kInt4ChunkK * 2;
  static constexpr int kWarpTiles = kT.row_tiles() / kT.warps;
  // Lines of x: the tokens of the first chunk, then those of the next. Eight threads load one.
  static constexpr int kLineStep = kThreads / 8;
  static constexpr int kXLoads = kT.chunks * kT.tokens / kLineStep;
  static constexpr int kTokenLoads = kT.tokens > kLineStep ? kT.tokens / kLineStep : 1;
  static constexpr int kChunkStep = kT.tokens > kLineStep ? 1 : kLineStep / kT.tokens;
  // 16 bytes of scales, the other 16, and 8 of zeros, each by one lane.
  static constexpr int kScaleLoads = kWarpTiles * kT.chunks * 3;
  static_assert(kT.warps % 4 == 0 && kWarpTiles * kT.warps == kT.row_tiles());
  static_assert(kXLoads >= 1 && kXLoads * kLineStep == kT.chunks * kT.tokens);
  static_assert(kXLoads % kTokenLoads == 0 && kTokenLoads <= 32);
  static_assert(kLineStep % 8 == 0);  // the swizzle is that of the first line
  static_assert(kScaleLoads <= 32);

 public:
  static constexpr int kXAt = kT.weight_bytes(), kScaleAt = kXAt + kT.x_bytes();
  static_assert(kXAt % 1024 == 0 && kT.tokens % 8 == 0);

  __device__ __forceinline__ Int4WideLoader(const Int4LinearParams& p, const Int4WideWork& work,
                                            int thread)
      : chunk_(work.first_chunk), chunks_left_(work.chunk_end - work.first_chunk) {
    const Int4Weight& weight = p.weight;
    const int64_t first_tile = work.first_row / kInt4TileRows;
    // Of the weight's and x's rows that the block may have; the rest is zero.
    const int tiles_left =
        static_cast<int>(min(int64_t{kT.row_tiles()}, weight.shape.tiles() - first_tile));
    const int tokens_left = static_cast<int>(min(int64_t{kT.tokens}, p.gemm.m - work.first_token));
    const int warp = thread / 32, lane = thread % 32;

    tile_bytes_ = kT.warps * weight.shape.chunks() * kChunkBytes;
    g_weight_ = reinterpret_cast<const char*>(weight.packed) +
                ((first_tile + warp) * weight.shape.chunks() + work.first_chunk) * kChunkBytes +
                lane * 16;
    s_weight_ = warp * kT.chunks * kChunkBytes + lane * 16;
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
      tile_there_ |= uint32_t(warp + n * kT.warps < tiles_left) << n;
    }

    const int line = thread / 8, x_piece = thread % 8;
    const int token = line % kT.tokens;
    x_chunk_ = line / kT.tokens;
    const int64_t row_bytes = p.gemm.a.row_stride * sizeof(T);
    token_bytes_ = kLineStep * row_bytes;
    g_x_ = static_cast<const char*>(p.gemm.a.data) + (work.first_token + token) * row_bytes +
           (work.first_chunk + x_chunk_) * kXChunkBytes + x_piece * 16;
    s_x_ = kXAt + line * kXChunkBytes + ((x_piece ^ (line & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      token_there_ |= uint32_t(token + i * kLineStep < tokens_left) << i;
    }
    // NOTE: without this the comparisons above are repeated in every step, in 64 bits.
    asm volatile("" : "+r"(token_there_), "+r"(tile_there_));
    find_scales(weight, first_tile, tiles_left, warp, lane);
  }

  // The next step into a stage of the ring.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    // NOTE: a step of one chunk is always there.
    const auto there = [&](int chunk) { return kT.chunks == 1 || chunk < chunks_left_; };
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
#pragma unroll
      for (int chunk = 0; chunk < kT.chunks; ++chunk) {
        copy_async_16_if(s_stage + s_weight_ + (n * kT.warps * kT.chunks + chunk) * kChunkBytes,
                         g_weight_ + n * tile_bytes_ + chunk * kChunkBytes,
                         (tile_there_ >> n & 1) && there(chunk));
      }
    }
#pragma unroll
    for (int i = 0; i < kXLoads; ++i) {
      const int token = i % kTokenLoads, chunk = i / kTokenLoads * kChunkStep;
      copy_async_16_if(s_stage + s_x_ + i * (kLineStep * kXChunkBytes),
                       g_x_ + token * token_bytes_ + chunk * kXChunkBytes,
                       (token_there_ >> token & 1) && there(x_chunk_ + chunk));
    }
    if (thread % 32 < kScaleLoads) {
      // What is not there becomes 0, so that it adds nothing.
      const int bytes = there(scale_chunk_) ? scale_bytes_ : 0;
      const uint64_t group = group_chunks.divide(static_cast<uint32_t>(chunk_ + scale_chunk_));
      if (is_zero_) {
        copy_async_8(s_stage + s_scale_, g_scale_ + group * 8, bytes / 2);
      } else {
        copy_async_16(s_stage + s_scale_, g_scale_ + group * 32, bytes);
      }
    }
    g_weight_ += kT.chunks * kChunkBytes;
    g_x_ += kT.chunks * kXChunkBytes;
    chunks_left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  __device__ __forceinline__ void find_scales(const Int4Weight& weight, int64_t first_tile,
                                              int tiles_left, int warp, int lane) {
    const int place = lane / 3, piece = lane % 3;
    const int tile = warp + place / kT.chunks * kT.warps;
    scale_chunk_ = place % kT.chunks;
    is_zero_ = piece == 2;
    scale_bytes_ = tile < tiles_left ? 16 : 0;
    const int64_t first_group = (first_tile + tile) * weight.shape.groups;
    g_scale_ = is_zero_ ? reinterpret_cast<const char*>(weight.zero) + first_group * 8
                        : static_cast<const char*>(weight.scale) + first_group * 32 + piece * 16;
    s_scale_ = kScaleAt + (tile * kT.chunks + scale_chunk_) * kT.kScaleBytes + piece * 16;
  }

  const char *g_weight_, *g_x_, *g_scale_;
  int64_t tile_bytes_, token_bytes_;  // from one of the thread's loads to the next
  int chunk_, chunks_left_;           // of the next step
  int x_chunk_, scale_chunk_, scale_bytes_;
  uint32_t tile_there_ = 0, token_there_ = 0;  // a bit for each of the thread's loads
  uint32_t s_weight_, s_x_, s_scale_;
  bool is_zero_;
};

}  // namespace torchweld
