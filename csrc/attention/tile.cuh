// Tiles (rows, kDim) in shared memory: layout, loads and stores.
//
// A row has kDim elements in chunks of 16 bytes. Chunk c of row r is stored at chunk c ^ (r % 8),
// so that the eight rows of an ldmatrix access every bank once. A tile starts at a multiple of its
// row size. Therefore the address of chunk c is (address of chunk 0 of the row) ^ (c * 16).
#pragma once

#include "attention/params.h"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "device/thread.cuh"
#include "device/vec.cuh"

namespace torchweld {

template <typename T_, int kDim>
struct AttentionLayout {
  using T = T_;
  static constexpr int kRowBytes = kDim * sizeof(T);
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static constexpr int kChunks = kRowBytes / kVectorBytes;
  static_assert(kChunks % 8 == 0);

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row % 8)) * kVectorBytes;
  }
};

// A tile whose rows have kCols elements, in chunks of 16 bytes. The chunks are swizzled, so that
// the 8 rows of an ldmatrix lie in different banks.
template <typename T, int kTileRows, int kCols>
struct SharedTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kCols * sizeof(T);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kGroups = kRowBytes / 32;  // number of K steps of an mma (32 bytes) per row
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kChunks >= 2 && (kChunks & (kChunks - 1)) == 0);
  alignas(128) T s_data[kRows * kCols];

  static __device__ __forceinline__ int offset(int row, int chunk) {
    constexpr int kPeriod = kChunks < 8 ? kChunks : 8;
    return row * kRowBytes + (chunk ^ (row / (8 / kPeriod) % kPeriod)) * 16;
  }

  // Returns the address that is `bytes` bytes to the right of s_byte in the same row. `bytes` must
  // be a multiple of 16 and must have no bit in common with the byte column of s_byte. To address a
  // row that is 8 * n rows further down, callers may add 8 * n * kRowBytes to the result.
  static __device__ __forceinline__ uint32_t right_of(uint32_t s_byte, int bytes) {
    return (s_byte ^ (bytes % 128)) + bytes / 128 * 128;
  }

  // Returns the address one row below s_byte. s_byte must be in an even row.
  static __device__ __forceinline__ uint32_t below_even(uint32_t s_byte) {
    return (kChunks < 8 ? s_byte : s_byte ^ 16) + kRowBytes;
  }
};

// Returns the address that this lane passes to ldmatrix for a left operand (m16 x 32 bytes).
template <typename Tile>
__device__ __forceinline__ uint32_t left_lane(uint32_t s_tile, int row, int group,
                                              unsigned thread) {
  const int lane = thread % kWarp;
  return s_tile + Tile::offset(row + lane % 16, 2 * group + lane / 16);
}
template <typename Tile>
__device__ __forceinline__ uint32_t left_lane(uint32_t s_tile, int row, int group) {
  return left_lane<Tile>(s_tile, row, group, threadIdx.x);
}

// Returns the address that this lane passes to ldmatrix for two n8 tiles of a right operand.
template <typename Tile>
__device__ __forceinline__ uint32_t right_lane(uint32_t s_tile, int row, int group,
                                               unsigned thread) {
  const int lane = thread % kWarp;
  return s_tile + Tile::offset(row + lane % 8 + lane / 16 * 8, 2 * group + lane / 8 % 2);
}
template <typename Tile>
__device__ __forceinline__ uint32_t right_lane(uint32_t s_tile, int row, int group) {
  return right_lane<Tile>(s_tile, row, group, threadIdx.x);
}

// Copies consecutive tiles of kRows rows each from a strided matrix (rows, cols) to shared memory.
// Rows from `rows_left` on, and chunks from column `cols` on, become zeros and are not read.
template <typename Layout, int kRows, int kThreads>
class AttentionLoader {
  using T = typename Layout::T;
  static constexpr int kRowStep = kThreads / Layout::kChunks;
  static constexpr int kLoads = kRows / kRowStep;
  static_assert(kThreads % Layout::kChunks == 0 && kRows % kRowStep == 0);

 public:
  __device__ __forceinline__ AttentionLoader(const T* g_first, int64_t row_stride, int cols)
      : AttentionLoader(g_first, row_stride, cols, threadIdx.x) {}

  // `thread` is the index of this thread among the threads that copy.
  __device__ __forceinline__ AttentionLoader(const T* g_first, int64_t row_stride, int cols,
                                             int thread)
      : step_(row_stride * kRowStep), cols_(cols) {
    const ThreadChunks chunks(thread);
    g_next_ = g_first + chunks.row * row_stride + chunks.chunk * Layout::kElems;
  }

  __device__ __forceinline__ void load(int thread, uint32_t s_tile, int rows_left) {
    const ThreadChunks chunks(thread);
    const bool has_cols = chunks.chunk * Layout::kElems < cols_;
    // NOTE: the copy size is 0 or 16 bytes, so ptxas replaces the size by a predicate. Other sizes
    // would cost ten instructions per copy.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool live = has_cols && chunks.row + i * kRowStep < rows_left;
      copy_async_16(s_tile + chunks.offset(i), g_next_, live ? kVectorBytes : 0);
      g_next_ += step_;
    }
  }

  // Skips kSkipped rows of the matrix.
  template <int kSkipped>
  __device__ __forceinline__ void skip() {
    static_assert(kSkipped % kRowStep == 0);
    g_next_ += step_ * (kSkipped / kRowStep);
  }

  // Zeroes those rows of a tile that lie in a gap. Each thread zeroes only chunks that it has
  // copied. The tile starts at `key`. The caller must have waited for the copies.
  template <typename Gaps>
  static __device__ __forceinline__ void clear_gaps(int thread, T* s_tile, const Gaps& gaps,
                                                    int key) {
    if (!gaps.may_overlap(key, kRows)) return;
    const ThreadChunks chunks(thread);
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      if (!gaps.contains(key + chunks.row + i * kRowStep)) continue;
      char* const s_chunk = reinterpret_cast<char*>(s_tile) + chunks.offset(i);
      store_vec(reinterpret_cast<T*>(s_chunk), Vec<T, Layout::kElems>{});
    }
  }

  // Multiplies by `factor` the chunks that this thread has copied. The caller must have waited for
  // the copies.
  __device__ __forceinline__ void multiply(char* s_tile, float factor) const {
    const ThreadChunks chunks(threadIdx.x);
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      T* s_chunk = reinterpret_cast<T*>(s_tile + chunks.offset(i));
      auto chunk = load_vec<T, Layout::kElems>(s_chunk);
#pragma unroll
      for (T& x : chunk.values) x = from_float<T>(to_float(x) * factor);
      store_vec(s_chunk, chunk);
    }
  }

 private:
  // The chunks of a thread: one chunk in every kRowStep-th row.
  struct ThreadChunks {
    int row;
    int chunk;
    uint32_t first;

    __device__ __forceinline__ explicit ThreadChunks(int thread)
        : row(thread / Layout::kChunks),
          chunk(thread % Layout::kChunks),
          first(Layout::offset(row, chunk)) {}

    __device__ __forceinline__ uint32_t offset(int i) const {
      return (first ^ (i * kRowStep % 8 * kVectorBytes)) + i * kRowStep * Layout::kRowBytes;
    }
  };

  const T* g_next_;
  int64_t step_;
  int cols_;
};

// Copies up to kRows rows of `cols` elements from shared memory to consecutive rows in global
// memory. Rows from `rows` on are not copied. One warp calls this function.
template <typename Layout, int kRows>
__device__ __forceinline__ void store_rows(typename Layout::T* g_to, int64_t row_stride,
                                           const char* s_rows, int rows, int cols) {
  using T = typename Layout::T;
  const bool aligned = cols % Layout::kElems == 0;
  for (int i = threadIdx.x % 32; i < kRows * Layout::kChunks; i += 32) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const int col = chunk * Layout::kElems;
    if (row >= rows || col >= cols) continue;
    const T* s_from = reinterpret_cast<const T*>(s_rows + Layout::offset(row, chunk));
    T* g_row = g_to + row * row_stride + col;
    if (aligned) {
      store_vec(g_row, load_vec<T, Layout::kElems>(s_from));
    } else {
      for (int j = 0; j < min(Layout::kElems, cols - col); ++j) g_row[j] = s_from[j];
    }
  }
}

}  // namespace torchweld
