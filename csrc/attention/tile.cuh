// Tiles of (rows, kDim) in shared memory: how they are laid out, filled and emptied.
//
// A row is kDim elements, 16 bytes a chunk; chunk c of row r lies at chunk c ^ (r % 8), so that
// eight rows of one chunk, an ldmatrix, touch every bank once. A tile starts on a multiple of its
// row size: address ^ (c * 16) then walks the chunks of a row from its chunk 0.
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

// Rows of kCols elements in chunks of 16 bytes. The chunks of a row change places so that the 8
// rows of an ldmatrix lie in different banks.
template <typename T, int kTileRows, int kCols>
struct SharedTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kCols * sizeof(T);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kGroups = kRowBytes / 32;  // the depth of one product is 32 bytes
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kChunks >= 2 && (kChunks & (kChunks - 1)) == 0);
  alignas(128) T s_data[kRows * kCols];

  static __device__ __forceinline__ int offset(int row, int chunk) {
    constexpr int kTurn = kChunks < 8 ? kChunks : 8;
    return row * kRowBytes + (chunk ^ (row / (8 / kTurn) % kTurn)) * 16;
  }

  // From the address of a byte to the one `bytes` further right in its row, a multiple of 16 that
  // has no bit in common with the column of the first. Multiples of 8 rows are added to it.
  static __device__ __forceinline__ uint32_t right_of(uint32_t s_byte, int bytes) {
    return (s_byte ^ (bytes % 128)) + bytes / 128 * 128;
  }

  // From the address of a byte in an even row to the one below it.
  static __device__ __forceinline__ uint32_t below_even(uint32_t s_byte) {
    return (kChunks < 8 ? s_byte : s_byte ^ 16) + kRowBytes;
  }
};

// The address that this lane gives to ldmatrix, for a left operand (m16 x 32 bytes) ...
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

// ... and for two n8 tiles of a right operand.
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

// Copies consecutive tiles of kRows rows each from a strided (rows, cols) matrix. Rows from
// `rows_left` on and chunks from `cols` on are not read; they become zeros.
template <typename Layout, int kRows, int kThreads>
class AttentionLoader {
  using T = typename Layout::T;
  static constexpr int kRowStep = kThreads / Layout::kChunks;
  static constexpr int kLoads = kRows / kRowStep;
  static_assert(kThreads % Layout::kChunks == 0 && kRows % kRowStep == 0);

 public:
  __device__ __forceinline__ AttentionLoader(const T* g_first, int64_t row_stride, int cols)
      : AttentionLoader(g_first, row_stride, cols, threadIdx.x) {}

  // By threads that count from 0 among themselves.
  __device__ __forceinline__ AttentionLoader(const T* g_first, int64_t row_stride, int cols,
                                             int thread)
      : step_(row_stride * kRowStep), cols_(cols) {
    const Share share(thread);
    g_next_ = g_first + share.row * row_stride + share.chunk * Layout::kElems;
  }

  __device__ __forceinline__ void load(int thread, uint32_t s_tile, int rows_left) {
    const Share share(thread);
    const bool has_cols = share.chunk * Layout::kElems < cols_;
    // NOTE: all or nothing is one predicate to ptxas; other sizes take ten instructions a copy.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool live = has_cols && share.row + i * kRowStep < rows_left;
      copy_async_16(s_tile + share.offset(i), g_next_, live ? kVectorBytes : 0);
      g_next_ += step_;
    }
  }

  // Goes on so many rows further down.
  template <int kSkipped>
  __device__ __forceinline__ void skip() {
    static_assert(kSkipped % kRowStep == 0);
    g_next_ += step_ * (kSkipped / kRowStep);
  }

  // Multiplies what this thread has copied, once it is there.
  __device__ __forceinline__ void multiply(char* s_tile, float factor) const {
    const Share share(threadIdx.x);
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      T* s_chunk = reinterpret_cast<T*>(s_tile + share.offset(i));
      auto chunk = load_vec<T, Layout::kElems>(s_chunk);
#pragma unroll
      for (T& x : chunk.values) x = from_float<T>(to_float(x) * factor);
      store_vec(s_chunk, chunk);
    }
  }

 private:
  // A thread copies one chunk of every kRowStep-th row.
  struct Share {
    int row;
    int chunk;
    uint32_t first;

    __device__ __forceinline__ explicit Share(int thread)
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

// One warp writes kRows rows that lie in shared memory to consecutive rows of `cols` elements.
template <typename Layout, int kRows>
__device__ __forceinline__ void store_rows(typename Layout::T* g_to, const char* s_rows, int rows,
                                           int cols) {
  using T = typename Layout::T;
  const bool aligned = cols % Layout::kElems == 0;
  for (int i = threadIdx.x % 32; i < kRows * Layout::kChunks; i += 32) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const int col = chunk * Layout::kElems;
    if (row >= rows || col >= cols) continue;
    const T* s_from = reinterpret_cast<const T*>(s_rows + Layout::offset(row, chunk));
    T* g_row = g_to + static_cast<int64_t>(row) * cols + col;
    if (aligned) {
      store_vec(g_row, load_vec<T, Layout::kElems>(s_from));
    } else {
      for (int j = 0; j < min(Layout::kElems, cols - col); ++j) g_row[j] = s_from[j];
    }
  }
}

}  // namespace torchweld
