// What the kernel with the weight deep in registers reads: x, scales and zeros into the
// ring, the weight straight into registers.
//
// A stage of the ring holds, one after the other,
//   x        [chunk][token][64 columns]; 16-byte piece c of token r lies at c ^ (r % 8)
//   scales   [tile of 16 rows][chunk] 32 bytes of scales, 8 of zeros
#pragma once

#include "core/fast_divide.h"
#include "device/mma_sync.cuh"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

struct Int4DeepParams : Int4Operands {
  int64_t rows;                       // of the weight
  int tokens, tiles, chunks, groups;  // tiles of 16 rows
  int parts, part_chunks;             // of K
  FastDivisor group_chunks;
};

// Which tile of y and part of K a block has.
struct Int4DeepWork {
  int first_tile, first_token;
  int first_chunk, count;  // chunks of the part
  int part;

  __device__ __forceinline__ Int4DeepWork(const Int4DeepParams& p, const Int4DeepTile& tile,
                                          int part, int cluster)
      : first_tile(cluster * tile.row_tiles()),
        first_token(static_cast<int>(blockIdx.y) * tile.tokens),
        first_chunk(part * p.part_chunks),
        count(min(p.chunks - first_chunk, p.part_chunks)),
        part(part) {}
};

// Nothing is read before the first load.
template <int kTile>
class Int4DeepLoader {
  static constexpr Int4DeepTile kT = kInt4DeepTiles[kTile];
  static constexpr int kLineBytes = kInt4ChunkK * 2;
  // Lines of x: the tokens of the first chunk, then those of the next. Eight threads load one.
  static constexpr int kLineStep = kT.threads() / 8;
  static constexpr int kLoads = kT.chunks * kT.tokens / kLineStep;
  static constexpr int kTokenLoads = kT.tokens > kLineStep ? kT.tokens / kLineStep : 1;
  static constexpr int kChunkStep = kT.tokens > kLineStep ? 1 : kLineStep / kT.tokens;
  // 16 bytes of scales, the other 16, and 8 of zeros, each by one thread.
  static constexpr int kScaleItems = kT.row_tiles() * kT.chunks * 3;
  static_assert(kLoads >= 1 && kLoads * kLineStep == kT.chunks * kT.tokens);
  static_assert(kLoads % kTokenLoads == 0 && kTokenLoads <= 32);
  static_assert(kLineStep % 8 == 0 && kT.tokens % 8 == 0);  // the swizzle is that of the first line
  static_assert(kScaleItems <= kT.threads());

 public:
  static constexpr int kScaleAt = kT.x_bytes();

  __device__ __forceinline__ Int4DeepLoader(const Int4DeepParams& p, const Int4DeepWork& work,
                                            int thread)
      : chunk_(work.first_chunk), left_(work.count) {
    const int line = thread / 8, piece = thread % 8, token = line % kT.tokens;
    x_chunk_ = line / kT.tokens;
    g_x_ = p.x + (work.first_token + token) * p.x_row_bytes +
           (work.first_chunk + x_chunk_) * kLineBytes + piece * 16;
    token_bytes_ = kLineStep * p.x_row_bytes;
    s_x_ = line * kLineBytes + ((piece ^ (line & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      there_ |= uint32_t(work.first_token + token + i * kLineStep < p.tokens) << i;
    }
    const int place = thread / 3, scale_piece = thread % 3;
    const int tile = work.first_tile + place / kT.chunks;
    scale_chunk_ = place % kT.chunks;
    is_zero_ = scale_piece == 2;
    scale_bytes_ = tile < p.tiles ? 16 : 0;
    const int64_t first_group = int64_t{tile} * p.groups;
    g_scale_ = is_zero_ ? p.zero + first_group * 8 : p.scale + first_group * 32 + scale_piece * 16;
    s_scale_ = kScaleAt + place * kT.kScaleBytes + scale_piece * 16;
    asm volatile("" : "+r"(there_));  // NOTE: else it is computed anew in every step
  }

  // The next step into a stage of the ring. What is not there becomes 0, so that it adds nothing.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = i % kTokenLoads, chunk = i / kTokenLoads * kChunkStep;
      copy_async_16_if(s_stage + s_x_ + i * (kLineStep * kLineBytes),
                       g_x_ + token * token_bytes_ + chunk * kLineBytes,
                       (there_ >> token & 1) && x_chunk_ + chunk < left_);
    }
    if (thread < kScaleItems) {
      const int bytes = scale_chunk_ < left_ ? scale_bytes_ : 0;
      const uint64_t group =
          bytes > 0 ? group_chunks.divide(static_cast<uint32_t>(chunk_ + scale_chunk_)) : 0;
      if (is_zero_) {
        copy_async_8(s_stage + s_scale_, g_scale_ + group * 8, bytes / 2);
      } else {
        copy_async_16(s_stage + s_scale_, g_scale_ + group * 32, bytes);
      }
    }
    g_x_ += kT.chunks * kLineBytes;
    left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  const char *g_x_, *g_scale_;
  int64_t token_bytes_;  // from one of the thread's loads to the next
  int chunk_, left_;     // of the next step
  int x_chunk_, scale_chunk_, scale_bytes_;
  uint32_t there_ = 0;  // a bit for each of the thread's loads
  uint32_t s_x_, s_scale_;
  bool is_zero_;
};

}  // namespace torchweld
