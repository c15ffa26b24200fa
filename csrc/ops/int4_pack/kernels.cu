// The kernels of int4_pack, int4_unpack and int4_repack. A thread writes one word, or one scale
// (the scale of one row and one group).
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "ops/int4_pack/int4_pack.h"

namespace torchweld {
namespace {

constexpr int kPackThreads = 256;
// The maximum number of blocks. In larger problems, each thread processes several items.
constexpr int64_t kMaxBlocks = 1 << 20;

__device__ __forceinline__ int64_t first_index() {
  return int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t index_step() { return int64_t{gridDim.x} * kPackThreads; }

__host__ __device__ __forceinline__ int64_t words_of(int64_t cols) {
  return (cols + kInt4Unit - 1) / kInt4Unit;
}

__global__ __launch_bounds__(kPackThreads) void int4_pack_kernel(const Int4PackParams p) {
  const int64_t words = words_of(p.cols);
  for (int64_t index = first_index(); index < p.rows * words; index += index_step()) {
    const int64_t row = index / words, column = index % words * kInt4Unit;
    const uint8_t* g_codes = p.codes + row * p.row_stride + column;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kInt4Unit; ++i) {
      if (column + i < p.cols) word |= (g_codes[i] & 15u) << (4 * i);
    }
    p.packed[index] = word;
  }
}

__global__ __launch_bounds__(kPackThreads) void int4_unpack_kernel(const Int4UnpackParams p) {
  const int64_t words = words_of(p.cols);
  for (int64_t index = first_index(); index < p.rows * words; index += index_step()) {
    const int64_t row = index / words, column = index % words * kInt4Unit;
    const uint32_t word = p.packed[row * p.row_stride + index % words];
    uint8_t* g_codes = p.codes + row * p.cols + column;
#pragma unroll
    for (int i = 0; i < kInt4Unit; ++i) {
      if (column + i < p.cols) g_codes[i] = static_cast<uint8_t>(int4_code(word, i));
    }
  }
}

__global__ __launch_bounds__(kPackThreads) void int4_repack_kernel(const Int4RepackParams p) {
  const int64_t words = p.shape.packed_words(), chunks = p.shape.chunks();
  for (int64_t index = first_index(); index < words; index += index_step()) {
    const int in_chunk = static_cast<int>(index % kInt4ChunkWords);
    const int64_t first_row = index / kInt4ChunkWords / chunks * kInt4TileRows;
    const int64_t first_unit = index / kInt4ChunkWords % chunks * kInt4ChunkUnits;
    p.packed[index] = int4_repacked_word(in_chunk / 4, in_chunk % 4, [&](int row, int unit) {
      const int64_t n = first_row + row, u = first_unit + unit;
      const bool valid = n < p.shape.n && u < p.shape.units();
      return valid ? p.qweight[n * p.qweight_strides.row + u * p.qweight_strides.column] : 0u;
    });
  }
}

// Repacks scales and zeros. A thread writes one scale, which belongs to one row and one group.
// Every eighth thread also writes the zeros of eight rows.
template <typename T>
__global__ __launch_bounds__(kPackThreads) void int4_repack_scales_kernel(
    const Int4RepackParams p) {
  const int64_t groups = p.shape.groups, count = p.shape.tiles() * groups * kInt4TileRows;
  const T* g_scale = static_cast<const T*>(p.scale);
  for (int64_t index = first_index(); index < count; index += index_step()) {
    const int row = static_cast<int>(index % kInt4TileRows);
    const int64_t tile_group = index / kInt4TileRows;
    const int64_t first_row = tile_group / groups * kInt4TileRows, group = tile_group % groups;
    const int64_t n = first_row + row;
    const T scale = n < p.shape.n
                        ? g_scale[n * p.scale_strides.row + group * p.scale_strides.column]
                        : from_float<T>(0.f);
    static_cast<T*>(p.packed_scale)[tile_group * kInt4TileRows + int4_scale_place(row)] = scale;
    if (row % kInt4Unit != 0) continue;
    uint32_t zeros = 0;
    for (int i = 0; i < kInt4Unit && n + i < p.shape.n; ++i) {
      const uint32_t word =
          p.zero[(n + i) * p.zero_strides.row + group / kInt4Unit * p.zero_strides.column];
      zeros |= int4_code(word, static_cast<int>(group % kInt4Unit)) << (4 * i);
    }
    p.packed_zero[tile_group * 2 + row / kInt4Unit] = zeros;
  }
}

// Returns a grid with one thread per item, but at most kMaxBlocks blocks.
Grid grid_for(int64_t count) {
  const int64_t blocks = (count + kPackThreads - 1) / kPackThreads;
  return {blocks < kMaxBlocks ? blocks : kMaxBlocks, kPackThreads};
}

}  // namespace

void launch_int4_pack(const Int4PackParams& p, cudaStream_t stream) {
  launch_kernel(int4_pack_kernel, grid_for(p.rows * words_of(p.cols)), stream, p);
  check_launch("int4_pack");
}

void launch_int4_unpack(const Int4UnpackParams& p, cudaStream_t stream) {
  launch_kernel(int4_unpack_kernel, grid_for(p.rows * words_of(p.cols)), stream, p);
  check_launch("int4_unpack");
}

void launch_int4_repack(const Int4RepackParams& p, cudaStream_t stream) {
  if (p.shape.packed_words() == 0) return;
  launch_kernel(int4_repack_kernel, grid_for(p.shape.packed_words()), stream, p);
  const int64_t rows = p.shape.tiles() * p.shape.groups * kInt4TileRows;
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    launch_kernel(int4_repack_scales_kernel<T>, grid_for(rows), stream, p);
  });
  check_launch("int4_repack");
}

}  // namespace torchweld
