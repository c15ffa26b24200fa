// Loads tiles of the operands from global memory into the ring of stages in shared memory, and
// reads fragments from the ring.
//
// A tile has kRows rows (M or N) of one k-block. The dim that is contiguous in global memory
// determines the layout of the tile in shared memory:
//   K-major   [row][k], 128 bytes per row; 16-byte chunk c of row r lies at index c ^ (r % 8)
//   MN-major  [k][row]; chunk c of column k lies at c ^ (k % 8), or for fp32 at c ^ (k % 4 * 2)
// With these swizzles, neither ldmatrix nor the 4-byte reads of MN-major fp32 have bank conflicts.
#pragma once

#include "device/mma_sync.cuh"
#include "gemm/gemm.h"

namespace torchweld {

// Maps row r of a tile to a half of the operand (`half`) and to a row of that half (`column`). In a
// gated product, groups of 8 rows of b come alternately from the left and the right half. One warp
// thus computes both halves of the same columns of y.
struct RowOrder {
  bool gated;
  __device__ __forceinline__ int64_t column(int r) const {
    return gated ? (r >> 4) * 8 + (r & 7) : r;
  }
  __device__ __forceinline__ int half(int r) const { return gated ? (r >> 3) & 1 : 0; }
};

struct TileSource {
  const char* data;    // the operand's matrix of this batch, in global memory
  int64_t row_bytes;   // distance between rows, in bytes; if gated, between rows of one half
  int64_t k_bytes;     // distance between elements along K, in bytes
  int64_t half_bytes;  // distance from the left half to the right half, in bytes
  int64_t first_row;   // first row of this block's tile; if gated, counted within one half
  int64_t rows;        // the number of rows of the operand; if gated, of one half
  RowOrder order;
};

// The loads of a k-block are divided into kParts parts. The parts are issued between the
// multiplications of an earlier k-block.
constexpr int kParts = 4;

// Issues a thread's loads of a tile into the ring. Each load copies a chunk of 16 bytes.
template <typename T, int kRows, int kThreads, bool kKMajor>
class TileLoader {
  static constexpr int kChunkElems = 16 / sizeof(T);
  static constexpr int kBlockK = kKBlockBytes / sizeof(T);
  // kContiguousChunks is the size of the tile along its contiguous dim, in chunks. kStrided is the
  // size along the other dim, in elements. The contiguous dim is K if the operand is K-major;
  // otherwise it is M or N.
  static constexpr int kContiguousChunks = kKMajor ? 8 : kRows / kChunkElems;
  static constexpr int kStrided = kKMajor ? kRows : kBlockK;
  static constexpr int kStridedStep = kThreads / kContiguousChunks;
  static constexpr int kLoads = kStrided / kStridedStep;
  // The swizzle repeats with this period, in rows of shared memory. The rows of a thread's chunks
  // differ by multiples of the period, so all chunks of a thread have the same swizzle.
  static constexpr int kSwizzlePeriod = kKMajor || sizeof(T) == 2 ? 8 : 4;
  static_assert(kThreads % kContiguousChunks == 0 && kStrided % kStridedStep == 0 && kLoads <= 32);
  static_assert(kStridedStep % (kKMajor ? 16 : kSwizzlePeriod) == 0);

 public:
  __device__ __forceinline__ TileLoader(const TileSource& source, int64_t k_begin, int64_t k_end,
                                        int thread)
      : k_left_(int(k_end - k_begin)) {
    const int chunk = thread % kContiguousChunks, strided = thread / kContiguousChunks;
    const int first = kKMajor ? strided : chunk * kChunkElems;
    const int64_t row = source.first_row + source.order.column(first);
    from_ = source.data + row * source.row_bytes + source.order.half(first) * source.half_bytes +
            (k_begin + (kKMajor ? chunk * kChunkElems : strided)) * source.k_bytes;
    if constexpr (kKMajor) {
      const int64_t step = source.order.column(kStridedStep);
      stride_bytes_ = step * source.row_bytes;
      k_left_ -= chunk * kChunkElems;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) valid_ |= uint32_t(row + i * step < source.rows) << i;
    } else {
      stride_bytes_ = kStridedStep * source.k_bytes;
      k_left_ -= strided;
      valid_ = row < source.rows;
    }
    wrap_bytes_ =
        (kKMajor ? int64_t{kKBlockBytes} : kBlockK * source.k_bytes) - kLoads * stride_bytes_;
    const int swizzle = kSwizzlePeriod == 8 ? strided & 7 : (strided & 3) << 1;
    s_offset_ = strided * kContiguousChunks * 16 + ((chunk ^ swizzle) << 4);
  }

  // Loads part kPart of the next k-block into a stage of the ring. The caller must load parts 0 to
  // kParts - 1 in order.
  template <int kPart>
  __device__ __forceinline__ void load(uint32_t s_stage) {
    constexpr int kFirst = kPart * kLoads / kParts, kLast = (kPart + 1) * kLoads / kParts;
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      const bool there =
          kKMajor ? k_left_ > 0 && (valid_ >> i & 1) : valid_ && k_left_ > i * kStridedStep;
      copy_async_16_if(s_stage + s_offset_ + i * kStridedStep * kContiguousChunks * 16, from_,
                       there);
      from_ += stride_bytes_;
    }
    if constexpr (kPart == kParts - 1) {
      from_ += wrap_bytes_;
      k_left_ -= kBlockK;
    }
  }

  // Adds `elems` elements to the global-memory address of the next loads.
  __device__ __forceinline__ void skip(int64_t elems) {
    from_ += elems * static_cast<int64_t>(sizeof(T));
  }

 private:
  const char* from_;  // the global-memory address of this thread's next chunk
  // stride_bytes_ is added to the address after each chunk of this thread. After the last chunk of
  // a k-block, wrap_bytes_ is added as well, so that the address points to the next k-block.
  int64_t stride_bytes_, wrap_bytes_;
  int k_left_;  // number of elements from this thread's chunk to the end of its split of K
  uint32_t valid_ = 0;
  uint32_t s_offset_;
};

// Reads fragments of a warp's rows from the ring. A fragment covers one slice along K. A slice has
// two chunks, which are 16 elements of 16 bits or 8 elements of fp32. The warp's first row is a
// multiple of 32, so every address has the form s_tile + offset_ + (swizzle_ ^ x) + y, where x and
// y are the same for all lanes.
template <typename T, int kRows, bool kKMajor>
class FragmentReader {
  static constexpr int kSharedRowBytes = kKMajor ? 128 : kRows * int(sizeof(T));
  // Whether ldmatrix can load the fragment.
  static constexpr bool kMatrix = kKMajor || sizeof(T) == 2;

 public:
  // If kForA is true, `load` reads one fragment of mma's A operand into r[0] to r[3]. Otherwise it
  // reads two fragments of mma's B operand: r[0] and r[1] are the first one, r[2] and r[3] the
  // second one.
  template <bool kForA>
  static __device__ __forceinline__ FragmentReader make(int lane, int first_row) {
    const int q = lane >> 3, in = lane & 7, g = lane >> 2, t = lane & 3;
    // ldmatrix loads four 8 x 8 matrices. Each lane passes the address of one row of one matrix.
    // row_bit says which group of 8 rows this matrix covers, and k_bit says which chunk of the
    // slice it covers.
    const int row_bit = kForA ? q & 1 : q >> 1, k_bit = kForA ? q >> 1 : q & 1;
    FragmentReader reader;
    if constexpr (kKMajor) {
      reader.offset_ = (first_row + row_bit * 8 + in) * 128;
      reader.swizzle_ = (k_bit ^ in) << 4;
    } else if constexpr (kMatrix) {
      reader.offset_ = (k_bit * 8 + in) * kSharedRowBytes;
      reader.swizzle_ = ((first_row / 8 + row_bit) ^ in) << 4;
    } else {
      reader.offset_ = t * kSharedRowBytes + (g & 3) * 4;
      reader.swizzle_ = ((first_row / 4 + (g >> 2)) ^ (t << 1)) << 4;
    }
    return reader;
  }

  // Loads the fragment of the warp's rows 16 * i to 16 * i + 15 in slice `slice`.
  template <bool kForA>
  __device__ __forceinline__ void load(uint32_t (&r)[4], uint32_t s_tile, int i, int slice) const {
    if constexpr (kKMajor) {
      load_matrix_4(r, s_tile + offset_ + (swizzle_ ^ (slice << 5)) + i * 16 * 128);
    } else if constexpr (kMatrix) {
      load_matrix_4_transposed(
          r, s_tile + offset_ + (swizzle_ ^ (i << 5)) + slice * 16 * kSharedRowBytes);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row_bit = kForA ? k & 1 : k >> 1, k_bit = kForA ? k >> 1 : k & 1;
        r[k] = load_word(s_tile + offset_ + (swizzle_ ^ (i * 4 + row_bit * 2) << 4) +
                         (slice * 8 + k_bit * 4) * kSharedRowBytes);
      }
    }
  }

 private:
  uint32_t offset_, swizzle_;
};

}  // namespace torchweld
