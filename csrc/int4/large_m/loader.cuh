// Loads the ring of the large-M kernel.
//
// A stage of the ring holds
//   weights  [tile of 16 rows][chunk][lane] 16 bytes, in the repacked layout
//   x        [chunk][token][64 columns]; 16-byte vector c of token r is stored at c ^ (r % 8)
//   scales   [tile][chunk] 32 bytes of scales, then 8 bytes of zeros
// A warp copies only the weights, scales and zeros that the warp itself reads.
#pragma once

#include "int4/copies.cuh"

namespace torchweld {

template <typename T, int kTile>
class Int4LargeMLoader {
  static constexpr Int4LargeMTile kT = kInt4LargeMTiles[kTile];
  static constexpr int kChunkBytes = kInt4ChunkWords * 4, kElem = sizeof(T);
  static constexpr int kXChunkBytes = kInt4ChunkK * kElem;
  static constexpr int kWarpTiles = kT.row_tiles() / kT.warps;
  using ScaleCopy = Int4ScaleCopy<kT.chunks>;
  // The number of copies of scales or zeros that a warp issues for each stage.
  static constexpr int kScaleLoads = kWarpTiles * kT.chunks * ScaleCopy::kCopies;
  static_assert(kT.warps % 4 == 0 && kWarpTiles * kT.warps == kT.row_tiles());
  static_assert(kScaleLoads <= 32);

 public:
  static constexpr int kXAt = kT.weight_bytes(), kScaleAt = kXAt + kT.x_bytes();
  static_assert(kXAt % 1024 == 0 && kT.tokens % 8 == 0);

  __device__ __forceinline__ Int4LargeMLoader(const Int4LinearParams& p, const Int4WorkTile& work,
                                              int thread)
      : chunk_(work.first_chunk),
        chunks_left_(work.chunks()),
        x_(static_cast<const char*>(p.gemm.a.data) +
               work.first_token * p.gemm.a.row_stride * kElem + work.first_chunk * kXChunkBytes,
           p.gemm.a.row_stride * kElem, work.tokens_left(p, kT.tokens), kXAt, thread),
        scale_(scale_copy(p, work, thread / 32, thread % 32)) {
    const Int4Shape& shape = p.weight.shape;
    const int warp = thread / 32, lane = thread % 32,
              tiles_left = work.tiles_left(p, kT.row_tiles());
    tile_stride_ = kT.warps * shape.chunks() * kChunkBytes;
    g_weight_ = reinterpret_cast<const char*>(p.weight.packed) +
                ((work.first_row / kInt4TileRows + warp) * shape.chunks() + work.first_chunk) *
                    kChunkBytes +
                lane * 16;
    s_weight_ = warp * kT.chunks * kChunkBytes + lane * 16;
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
      tile_valid_ |= uint32_t(warp + n * kT.warps < tiles_left) << n;
    }
    // NOTE: without this asm the compiler would recompute tile_valid_ in every k-block.
    asm volatile("" : "+r"(tile_valid_));
  }

  // Loads the next k-block into a stage.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    // NOTE: if a k-block has only one chunk, this chunk is never behind the end of the split.
    const auto valid = [&](int chunk) { return kT.chunks == 1 || chunk < chunks_left_; };
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
#pragma unroll
      for (int chunk = 0; chunk < kT.chunks; ++chunk) {
        copy_async_16_if(s_stage + s_weight_ + (n * kT.warps * kT.chunks + chunk) * kChunkBytes,
                         g_weight_ + n * tile_stride_ + chunk * kChunkBytes,
                         (tile_valid_ >> n & 1) && valid(chunk));
      }
    }
    x_.load(s_stage, [&](int chunk) { return valid(x_.first_chunk() + chunk); });
    if (thread % 32 < kScaleLoads) scale_.load(s_stage, group_chunks, chunk_, chunks_left_);
    g_weight_ += kT.chunks * kChunkBytes;
    chunks_left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  static __device__ __forceinline__ ScaleCopy scale_copy(const Int4LinearParams& p,
                                                         const Int4WorkTile& work, int warp,
                                                         int lane) {
    const Int4Weight& weight = p.weight;
    const int place = lane / ScaleCopy::kCopies, chunk = place % kT.chunks;
    const int tile = warp + place / kT.chunks * kT.warps;
    return {static_cast<const char*>(weight.scale),
            reinterpret_cast<const char*>(weight.zero),
            weight.shape.groups,
            work.first_row / kInt4TileRows + tile,
            tile < work.tiles_left(p, kT.row_tiles()),
            chunk,
            lane % ScaleCopy::kCopies,
            uint32_t(kScaleAt + (tile * kT.chunks + chunk) * kInt4ScaleBytes)};
  }

  const char* g_weight_;
  int64_t tile_stride_;  // the distance in bytes between consecutive loads of the thread
  // chunk_ is the first chunk of the next k-block. chunks_left_ is the number of chunks from chunk_
  // to the end of the split.
  int chunk_, chunks_left_;
  Int4XCopies<kInt4LargeMTiles, kTile, kElem> x_;
  ScaleCopy scale_;
  uint32_t tile_valid_ = 0;  // bit i is set if the row tile of the thread's load i exists
  uint32_t s_weight_;
};

}  // namespace torchweld
