// Loads x, scales and zeros into the ring of the small-M kernel. The warps load the weight
// themselves.
//
// A stage of the ring holds
//   x        [chunk][token][64 columns]; 16-byte vector c of token r is stored at c ^ (r % 8)
//   scales   [tile of 16 rows][chunk] 32 bytes of scales, then 8 bytes of zeros
#pragma once

#include "int4/copies.cuh"

namespace torchweld {

struct Int4SmallMParams : Int4Operands {
  int64_t rows;                       // the number of rows of the weight
  int tokens, tiles, chunks, groups;  // `tiles` is the number of weight tiles of 16 rows
  int splits, split_chunks;  // the number of splits of K, and the number of chunks per split
  FastDivisor group_chunks;
};

// The tile of y and the split of K that a block computes.
struct Int4SmallMWorkTile {
  int first_tile, first_token;
  int first_chunk, count;  // the first chunk of the block's split, and the split's number of chunks
  int split;

  __device__ __forceinline__ Int4SmallMWorkTile(const Int4SmallMParams& p,
                                                const Int4SmallMTile& tile, int split, int cluster)
      : first_tile(cluster * tile.row_tiles()),
        first_token(static_cast<int>(blockIdx.y) * tile.tokens),
        first_chunk(split * p.split_chunks),
        count(min(p.chunks - first_chunk, p.split_chunks)),
        split(split) {}
};

// The loader of x, scales and zeros. Its constructor reads no global memory, so it may run before
// griddep_wait.
template <int kTile>
class Int4SmallMLoader {
  static constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  using ScaleCopy = Int4ScaleCopy<kT.chunks>;
  static constexpr int kScaleLoads = kT.row_tiles() * kT.chunks * ScaleCopy::kCopies;
  static_assert(kT.tokens % 8 == 0 && kScaleLoads <= kT.threads());

 public:
  static constexpr int kScaleAt = kT.x_bytes();

  __device__ __forceinline__ Int4SmallMLoader(const Int4SmallMParams& p,
                                              const Int4SmallMWorkTile& work, int thread)
      : Int4SmallMLoader(p, work, thread, thread / ScaleCopy::kCopies) {}

  // Loads the next k-block into a stage. Elements outside of the tensors become 0.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    x_.load(s_stage, [&](int chunk) { return x_.first_chunk() + chunk < left_; });
    if (thread < kScaleLoads) scale_.load(s_stage, group_chunks, chunk_, left_);
    left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  // `place` is the index of the thread's scales in the array [tile][chunk].
  __device__ __forceinline__ Int4SmallMLoader(const Int4SmallMParams& p,
                                              const Int4SmallMWorkTile& work, int thread, int place)
      : chunk_(work.first_chunk),
        left_(work.count),
        x_(p.x + work.first_token * p.x_row_bytes + work.first_chunk * (kInt4ChunkK * 2),
           p.x_row_bytes, p.tokens - work.first_token, 0, thread),
        scale_(p.scale, p.zero, p.groups, work.first_tile + place / kT.chunks,
               work.first_tile + place / kT.chunks < p.tiles, place % kT.chunks,
               thread % ScaleCopy::kCopies, kScaleAt + place * kInt4ScaleBytes) {}

  // chunk_ is the first chunk of the next k-block. left_ is the number of chunks from chunk_ to the
  // end of the split.
  int chunk_, left_;
  Int4XCopies<kInt4SmallMTiles, kTile, 2> x_;
  ScaleCopy scale_;
};

}  // namespace torchweld
