// Loads the ring of the mma.sync kernel.
//
// A stage of the ring holds
//   weights  [tile of 16 rows][chunk][lane] 16 bytes, in the repacked layout
//   x        [chunk][token][column]; for 16-bit x, 16-byte vector c of token r is at c ^ (r % 8)
//   scales   [tile][chunk][16]
//   zeros    [tile][chunk] two words
// Scales and zeros are absent unless every group consists of whole chunks.
#pragma once

#include "int4/copies.cuh"

namespace torchweld {

template <typename T, int kTile, bool kWholeChunks>
class Int4Loader {
  static constexpr Int4Tile kT = kInt4Tiles[kTile];
  static constexpr int kThreads = kT.threads(), kElem = sizeof(T);
  // The number of 16-byte vectors that a row tile of the weight has in a k-block. In global memory,
  // these vectors are contiguous.
  static constexpr int kTileVectors = kT.chunks * 32;
  static constexpr int kTileStep = kThreads / kTileVectors;
  static constexpr int kWeightLoads = kT.row_tiles() / kTileStep;
  static constexpr int kChunkBytes = kInt4ChunkWords * 4, kXChunkBytes = kInt4ChunkK * kElem;
  static constexpr int kXVectors = kXChunkBytes / 16;
  // The number of 16-byte vectors of scales and the number of words of zeros in a stage. A thread
  // loads at most one vector of scales or one word of zeros.
  static constexpr int kScaleLoads = kT.scale_bytes(kElem) / 16;
  static constexpr int kZeroLoads = kT.zero_bytes() / 4;
  static constexpr int kZeroThread = kThreads - kZeroLoads;
  static_assert(kThreads % kTileVectors == 0 && kT.row_tiles() % kTileStep == 0);
  static_assert(kScaleLoads <= kZeroThread);

 public:
  static constexpr int kScaleAt = kT.weight_bytes() + kT.x_bytes(kElem);
  static constexpr int kZeroAt = kScaleAt + kT.scale_bytes(kElem);

  __device__ __forceinline__ Int4Loader(const Int4LinearParams& p, const Int4WorkTile& work,
                                        int thread)
      : chunk_(work.first_chunk),
        chunks_left_(work.chunks()),
        x_(static_cast<const char*>(p.gemm.a.data) +
               work.first_token * p.gemm.a.row_stride * kElem +
               int64_t{work.first_chunk} * kXChunkBytes,
           p.gemm.a.row_stride * kElem, work.tokens_left(p, kT.tokens), kT.weight_bytes(), thread) {
    const Int4Weight& weight = p.weight;
    const int64_t first_tile = work.first_row / kInt4TileRows;
    const int tiles_left = work.tiles_left(p, kT.row_tiles());
    const int tile = thread / kTileVectors, vector = thread % kTileVectors;
    tile_stride_ = kTileStep * weight.shape.chunks() * kChunkBytes;
    g_weight_ = reinterpret_cast<const char*>(weight.packed) +
                ((first_tile + tile) * weight.shape.chunks() + work.first_chunk) * kChunkBytes +
                vector * 16;
    weight_chunk_ = vector / 32;
#pragma unroll
    for (int i = 0; i < kWeightLoads; ++i) {
      valid_tile_bytes_[i] = tile + i * kTileStep < tiles_left ? 16 : 0;
    }
    const int64_t unit_end = min(weight.shape.units(), int64_t{work.chunk_end} * kInt4ChunkUnits);
    units_left_ = static_cast<int>(unit_end - (int64_t{work.first_chunk} + x_.first_chunk()) *
                                                  kInt4ChunkUnits) -
                  thread % kXVectors * kInt4ChunkUnits / kXVectors;
    if constexpr (kWholeChunks) find_scales(weight, first_tile, tiles_left, thread);
  }

  // Loads the next k-block into a stage.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    // NOTE: if a k-block has only one chunk, this chunk is never behind the end of the split. To
    // skip a chunk, cp.async gets a byte count of 0, which replaces a predicate.
    const bool chunk_valid = kT.chunks == 1 || weight_chunk_ < chunks_left_;
#pragma unroll
    for (int i = 0; i < kWeightLoads; ++i) {
      copy_async_16(s_stage + (thread + i * kThreads) * 16, g_weight_ + i * tile_stride_,
                    chunk_valid ? valid_tile_bytes_[i] : 0);
    }
    x_.load(s_stage, [&](int chunk) {
      return (kWholeChunks && kT.chunks == 1) || units_left_ > chunk * kInt4ChunkUnits;
    });
    if constexpr (kWholeChunks) load_scales(s_stage, group_chunks);
    g_weight_ += kT.chunks * kChunkBytes;
    units_left_ -= kT.chunks * kInt4ChunkUnits;
    chunks_left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  __device__ __forceinline__ void find_scales(const Int4Weight& weight, int64_t first_tile,
                                              int tiles_left, int thread) {
    // The index of this thread's word of zeros; negative for threads that load scales.
    const int word = thread - kZeroThread;
    const int place = word >= 0 ? word / 2 : thread / kElem;
    const int tile = place / kT.chunks;
    scale_chunk_ = place % kT.chunks;
    is_zero_ = word >= 0;
    loads_scale_ = is_zero_ || thread < kScaleLoads;
    scale_valid_ = tile < tiles_left;
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
    // Scales outside of the tensors become 0.
    const bool valid = scale_valid_ && (kT.chunks == 1 || scale_chunk_ < chunks_left_);
    const int64_t group = group_chunks.divide(static_cast<uint32_t>(chunk_ + scale_chunk_));
    if (is_zero_) {
      copy_async_4(s_stage + s_scale_, g_scale_ + group * 8, valid ? 4 : 0);
    } else {
      copy_async_16(s_stage + s_scale_, g_scale_ + group * (kInt4TileRows * kElem), valid ? 16 : 0);
    }
  }

  const char *g_weight_, *g_scale_ = nullptr;
  int64_t tile_stride_;  // the distance in bytes between consecutive loads of the thread
  // chunk_ is the first chunk of the next k-block. chunks_left_ is the number of chunks from chunk_
  // to the end of the split.
  int chunk_, chunks_left_;
  Int4XCopies<kInt4Tiles, kTile, kElem, kT.x_row_bytes(kElem)> x_;
  int units_left_;  // the number of units of the split from this thread's first vector of x on
  int weight_chunk_, scale_chunk_ = 0;
  int valid_tile_bytes_[kWeightLoads];
  uint32_t s_scale_ = 0;
  bool loads_scale_ = false, scale_valid_ = false, is_zero_ = false;
};

}  // namespace torchweld
