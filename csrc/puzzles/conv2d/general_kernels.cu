// Convolution with a convolution kernel of any size, in any dtype.
//
// A block computes a tile of outputs. A thread computes kGeneralRows outputs of one column. Taps
// are the elements of the convolution kernel. The block loops over chunks of kTapChunk x kTapChunk
// taps. For each chunk it copies the weights and the tile's x, with its halo, to shared memory in
// fp32. A thread reads its window column by column, so that it reads each value once for all its
// outputs. Images are stacked (StackedRows).
#include "device/dispatch.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

// The tile of outputs that a block computes. `columns` must be a power of two.
struct GeneralTile {
  int columns;

  TW_HOST_DEVICE int rows() const { return kGeneralThreads / columns * kGeneralRows; }
  // NOTE: an odd pitch avoids bank conflicts if a warp has several rows. staged_rows() has one more
  // row than the outputs need, because a thread also reads the row behind its window.
  TW_HOST_DEVICE int pitch(int taps_across) const { return (columns + taps_across - 1) | 1; }
  TW_HOST_DEVICE int staged_rows(int taps_down) const { return rows() + taps_down; }
  TW_HOST_DEVICE int floats(int taps_down, int taps_across) const {
    return staged_rows(taps_down) * pitch(taps_across) + taps_down * taps_across;
  }
};

__device__ __forceinline__ int chunk_of(int64_t left) {
  return static_cast<int>(left < kTapChunk ? left : kTapChunk);
}

// Adds the products of taps_down x taps_across taps to r_z. Each column of taps has its own
// accumulator, so that the error grows with the length of a column, not with the number of taps.
__device__ __forceinline__ void add_taps(float (&r_z)[kGeneralRows], const float* s_x, int pitch,
                                         const float* s_weight, int taps_down, int taps_across) {
  for (int q = 0; q < taps_across; ++q) {
    float r_x[kGeneralRows];  // row p + r of the window is at (p + r) % kGeneralRows
#pragma unroll
    for (int r = 0; r < kGeneralRows; ++r) r_x[r] = s_x[r * pitch + q];
    float r_column[kGeneralRows] = {};
    for (int first = 0; first < taps_down; first += kGeneralRows) {
#pragma unroll
      for (int u = 0; u < kGeneralRows; ++u) {
        const int p = first + u;
        if (p >= taps_down) break;
        const float weight = s_weight[p * taps_across + q];
#pragma unroll
        for (int r = 0; r < kGeneralRows; ++r) {
          r_column[r] = fmaf(weight, r_x[(u + r) % kGeneralRows], r_column[r]);
        }
        r_x[u] = s_x[(p + kGeneralRows) * pitch + q];
      }
    }
#pragma unroll
    for (int r = 0; r < kGeneralRows; ++r) r_z[r] += r_column[r];
  }
}

template <typename T>
__global__ __launch_bounds__(kGeneralThreads,
                             4) void conv2d_general_kernel(const Conv2dArgs<T> args,
                                                           const GeneralTile tile) {
  extern __shared__ float s_base[];
  const int64_t block = args.first_block + blockIdx.x;
  const int64_t row_tile = args.by_column_tiles.divide(block);
  const int64_t column_tile = block - row_tile * args.by_column_tiles.divisor();
  // The block's first output row, counted in the stack of all images.
  const int64_t first_row = row_tile * tile.rows();
  const int64_t first_column = column_tile * tile.columns;
  const int column = threadIdx.x % tile.columns;
  const int row = threadIdx.x / tile.columns * kGeneralRows;
  const StackedRows<T> stack{args};
  const int64_t rows_before = args.flipped ? args.kernel_height - 1 : 0;
  const int64_t columns_before = args.flipped ? args.kernel_width - 1 : 0;

  float r_z[kGeneralRows] = {};
  for (int64_t p0 = 0; p0 < args.kernel_height; p0 += kTapChunk) {
    const int taps_down = chunk_of(args.kernel_height - p0);
    for (int64_t q0 = 0; q0 < args.kernel_width; q0 += kTapChunk) {
      const int taps_across = chunk_of(args.kernel_width - q0);
      const int pitch = tile.pitch(taps_across);
      const int staged_rows = tile.staged_rows(taps_down);
      float* s_x = s_base;                          // (staged_rows, pitch)
      float* s_weight = s_x + staged_rows * pitch;  // (taps_down, taps_across)
      __syncthreads();
      // Copy x to shared memory. tile.columns threads copy a row.
      for (int r = threadIdx.x / tile.columns; r < staged_rows;
           r += kGeneralThreads / tile.columns) {
        const int64_t offset = stack.offset_in_x(first_row - rows_before + p0 + r);
        for (int c = column; c < pitch; c += tile.columns) {
          const int64_t j = first_column - columns_before + q0 + c;
          const bool valid = offset >= 0 && j >= 0 && j < args.width;
          s_x[r * pitch + c] = valid ? to_float(args.g_x[offset + j]) : 0.f;
        }
      }
      for (int i = threadIdx.x; i < taps_down * taps_across; i += kGeneralThreads) {
        s_weight[i] = weight_at(args, p0 + i / taps_across, q0 + i % taps_across);
      }
      __syncthreads();
      add_taps(r_z, s_x + row * pitch + column, pitch, s_weight, taps_down, taps_across);
    }
  }
  if (first_column + column >= args.width) return;
#pragma unroll
  for (int r = 0; r < kGeneralRows; ++r) {
    const int64_t offset = stack.offset_in_z(first_row + row + r);
    if (offset >= 0) args.g_z[offset + first_column + column] = from_float<T>(r_z[r]);
  }
}

}  // namespace

void launch_conv2d_general(const Conv2dParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const GeneralTile tile = {params.width <= 8 ? 8 : 32};
    const auto taps = [](int64_t size) {
      return static_cast<int>(size < kTapChunk ? size : kTapChunk);
    };
    const int bytes = 4 * tile.floats(taps(params.kernel_height), taps(params.kernel_width));
    const int64_t column_tiles = (params.width + tile.columns - 1) / tile.columns;
    const int64_t per_image = params.height + params.kernel_height - 1;
    const int64_t row_tiles = (params.batch * per_image + tile.rows() - 1) / tile.rows();
    for_each_grid(conv2d_args<T>(params, column_tiles, per_image), column_tiles * row_tiles,
                  [&](const Conv2dArgs<T>& args, int64_t blocks) {
                    launch_kernel(conv2d_general_kernel<T>, {blocks, kGeneralThreads, bytes},
                                  stream, args, tile);
                  });
  });
}

}  // namespace torchweld
