// What the kernel with the weight deep in registers reads: x, scales and zeros into the
// ring, the weight straight into registers.
//
// A stage of the ring holds, one after the other,
//   x        [chunk][token][64 columns]; 16-byte piece c of token r lies at c ^ (r % 8)
//   scales   [tile of 16 rows][chunk] 32 bytes of scales, 8 of zeros
#pragma once

#include "int4/copies.cuh"

namespace torchweld {

struct Int4SmallMParams : Int4Operands {
  int64_t rows;                       // of the weight
  int tokens, tiles, chunks, groups;  // tiles of 16 rows
  int parts, part_chunks;             // of K
  FastDivisor group_chunks;
};

// Which tile of y and part of K a block has.
struct Int4SmallMWorkTile {
  int first_tile, first_token;
  int first_chunk, count;  // chunks of the part
  int part;

  __device__ __forceinline__ Int4SmallMWorkTile(const Int4SmallMParams& p,
                                                const Int4SmallMTile& tile, int part, int cluster)
      : first_tile(cluster * tile.row_tiles()),
        first_token(static_cast<int>(blockIdx.y) * tile.tokens),
        first_chunk(part * p.part_chunks),
        count(min(p.chunks - first_chunk, p.part_chunks)),
        part(part) {}
};

// Nothing is read before the first load.
template <int kTile>
class Int4SmallMLoader {
  static constexpr Int4SmallMTile kT = kInt4SmallMTiles[kTile];
  using ScaleCopy = Int4ScaleCopy<kT.chunks>;
  static constexpr int kScaleLoads = kT.row_tiles() * kT.chunks * ScaleCopy::kPieces;
  static_assert(kT.tokens % 8 == 0 && kScaleLoads <= kT.threads());

 public:
  static constexpr int kScaleAt = kT.x_bytes();

  __device__ __forceinline__ Int4SmallMLoader(const Int4SmallMParams& p,
                                              const Int4SmallMWorkTile& work, int thread)
      : Int4SmallMLoader(p, work, thread, thread / ScaleCopy::kPieces) {}

  // The next step into a stage of the ring. What is not there becomes 0, so that it adds nothing.
  __device__ __forceinline__ void load(uint32_t s_stage, const FastDivisor& group_chunks,
                                       int thread) {
    x_.load(s_stage, [&](int chunk) { return x_.first_chunk() + chunk < left_; });
    if (thread < kScaleLoads) scale_.load(s_stage, group_chunks, chunk_, left_);
    left_ -= kT.chunks;
    chunk_ += kT.chunks;
  }

 private:
  // place: whose scales this thread copies, [tile][chunk].
  __device__ __forceinline__ Int4SmallMLoader(const Int4SmallMParams& p,
                                              const Int4SmallMWorkTile& work, int thread, int place)
      : chunk_(work.first_chunk),
        left_(work.count),
        x_(p.x + work.first_token * p.x_row_bytes + work.first_chunk * (kInt4ChunkK * 2),
           p.x_row_bytes, p.tokens - work.first_token, 0, thread),
        scale_(p.scale, p.zero, p.groups, work.first_tile + place / kT.chunks,
               work.first_tile + place / kT.chunks < p.tiles, place % kT.chunks,
               thread % ScaleCopy::kPieces, kScaleAt + place * kInt4ScaleBytes) {}

  int chunk_, left_;  // of the next step
  Int4XCopies<kInt4SmallMTiles, kTile, 2> x_;
  ScaleCopy scale_;
};

}  // namespace torchweld
