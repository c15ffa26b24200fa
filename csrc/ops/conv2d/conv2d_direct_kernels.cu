// Convolution in fp32 with small square kernels, in registers.
//
// A thread has 4 adjacent columns of several rows. It walks down the rows of x that these need,
// loads each row's window once (neighbours' windows overlap, and come from L1), and adds it to all
// the outputs that see it. The weights stay in registers. A block's threads lie 32 or fewer across
// and go on below and in the next image, so that small images fill it too.
#include "device/dispatch.cuh"
#include "ops/conv2d/conv2d_tiles.cuh"

namespace torchweld {
namespace {

template <int kTile, bool kFlipped_>
struct DirectConfig {
  static constexpr DirectTile kShape = kDirectTiles[kTile];
  static constexpr int kSize = kShape.size;
  static constexpr int kRows = kShape.rows;
  // Single elements need more registers than accesses do: for their conditions.
  static constexpr int blocks_per_sm(bool vector) {
    return vector ? kShape.blocks_per_sm : kShape.blocks_per_sm / 2;
  }
  static constexpr bool kFlipped = kFlipped_;
  static constexpr int kElems = kDirectColumns;
  // The window of a row: whole accesses, from kBefore columns before the first output on.
  static constexpr int kAccesses = 1 + (kSize - 1 + kElems - 1) / kElems;
  static constexpr int kBefore = kFlipped ? (kAccesses - 1) * kElems : 0;
  static constexpr int kShift = kFlipped ? kBefore - (kSize - 1) : 0;
  static constexpr int kRowsBefore = kFlipped ? kSize - 1 : 0;
  static_assert(kElems * sizeof(float) == kVectorBytes);
};

// What a thread has, relative to its first output; distances are clamped to what a thread can see.
struct DirectPlace {
  int rows_above, rows_below;       // rows of the image before and from the first output on
  int columns_left, columns_right;  // the same of columns
};

__device__ __forceinline__ int clamped(int64_t distance) {
  return static_cast<int>(distance < 1024 ? distance : 1024);
}

// The window of one row, zeros beyond the image.
template <typename Config, bool kVector>
__device__ __forceinline__ void load_window(float (&r_x)[Config::kAccesses * Config::kElems],
                                            const float* g_row, bool there,
                                            const DirectPlace& place) {
  constexpr int kElems = Config::kElems;
#pragma unroll
  for (int a = 0; a < Config::kAccesses; ++a) {
    const int first = a * kElems - Config::kBefore;
    if constexpr (kVector) {
      Vec<float, kElems> in = {};
      if (there && first >= -place.columns_left && first < place.columns_right) {
        in = load_vec<float, kElems>(g_row + first);
      }
#pragma unroll
      for (int c = 0; c < kElems; ++c) r_x[a * kElems + c] = in.values[c];
    } else {
#pragma unroll
      for (int c = 0; c < kElems; ++c) {
        const int column = first + c;
        const bool inside = column >= -place.columns_left && column < place.columns_right;
        r_x[a * kElems + c] = there && inside ? g_row[column] : 0.f;
      }
    }
  }
}

template <typename Config, bool kVector>
__global__ __launch_bounds__(
    kDirectThreads,
    Config::blocks_per_sm(kVector)) void conv2d_direct_kernel(const Conv2dArgs<float> args,
                                                              int log_across) {
  constexpr int kSize = Config::kSize;
  constexpr int kRows = Config::kRows;
  constexpr int kElems = Config::kElems;
  const int64_t block = args.first_block + blockIdx.x;
  const int64_t row_tile = args.by_column_tiles.divide(block);
  const int64_t column_tile = block - row_tile * args.by_column_tiles.divisor();
  const int across = threadIdx.x & ((1 << log_across) - 1);
  const int64_t unit = (row_tile << (8 - log_across)) + (threadIdx.x >> log_across);
  static_assert(kDirectThreads == 1 << 8);
  const int64_t image = args.by_image.divide(unit);
  const int64_t i = (unit - image * args.by_image.divisor()) * kRows;
  const int64_t j = ((column_tile << log_across) + across) * kElems;
  if (image >= args.batch || j >= args.width) return;
  const DirectPlace place = {clamped(i), clamped(args.height - i), clamped(j),
                             clamped(args.width - j)};

  float r_weight[kSize][kSize];
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
#pragma unroll
    for (int q = 0; q < kSize; ++q) {
      const int at = p * kSize + q;
      r_weight[p][q] = args.g_weight[Config::kFlipped ? kSize * kSize - 1 - at : at];
    }
  }

  const float* g_x =
      args.g_x + image * args.x_batch_stride + (i - Config::kRowsBefore) * args.x_row_stride + j;
  float* g_z = args.g_z + (image * args.height + i) * args.width + j;
  float r_z[kRows][kElems] = {};
#pragma unroll
  for (int step = 0; step < kRows + kSize - 1; ++step) {
    const int row = step - Config::kRowsBefore;
    float r_x[Config::kAccesses * kElems];
    const bool there = row >= -place.rows_above && row < place.rows_below;
    load_window<Config, kVector>(r_x, g_x + step * args.x_row_stride, there, place);
#pragma unroll
    for (int p = 0; p < kSize; ++p) {
      const int r = step - p;
      if (r < 0 || r >= kRows) continue;
#pragma unroll
      for (int q = 0; q < kSize; ++q) {
#pragma unroll
        for (int c = 0; c < kElems; ++c) {
          r_z[r][c] = fmaf(r_weight[p][q], r_x[Config::kShift + q + c], r_z[r][c]);
        }
      }
    }
    const int done = step - (kSize - 1);
    if (done < 0 || done >= place.rows_below) continue;
    float* g_out = g_z + done * args.width;
    if constexpr (kVector) {
      Vec<float, kElems> out;
#pragma unroll
      for (int c = 0; c < kElems; ++c) out.values[c] = r_z[done < 0 ? 0 : done][c];
      store_vec(g_out, out);
    } else {
#pragma unroll
      for (int c = 0; c < kElems; ++c) {
        if (c < place.columns_right) g_out[c] = r_z[done < 0 ? 0 : done][c];
      }
    }
  }
}

template <typename Config>
void launch_tile(const Conv2dParams& params, cudaStream_t stream) {
  int log_across = 0;
  while (log_across < 5 && (int64_t{kDirectColumns} << log_across) < params.width) ++log_across;
  const int64_t tile_columns = int64_t{kDirectColumns} << log_across;
  const int64_t column_tiles = (params.width + tile_columns - 1) / tile_columns;
  const int64_t per_image = (params.height + Config::kRows - 1) / Config::kRows;
  const int64_t below = kDirectThreads >> log_across;
  const int64_t row_tiles = (params.batch * per_image + below - 1) / below;
  for_each_grid(conv2d_args<float>(params, column_tiles, per_image), column_tiles * row_tiles,
                [&](const Conv2dArgs<float>& args, unsigned blocks) {
                  const auto kernel = args.aligned ? conv2d_direct_kernel<Config, true>
                                                   : conv2d_direct_kernel<Config, false>;
                  note_kernel(kernel, kDirectThreads, 0);
                  kernel<<<blocks, kDirectThreads, 0, stream>>>(args, log_across);
                });
}

template <int kTile = 0>
void dispatch_size(const Conv2dParams& params, cudaStream_t stream) {
  if constexpr (kTile < kNumDirectTiles) {
    if (params.kernel_height != kDirectTiles[kTile].size) {
      return dispatch_size<kTile + 1>(params, stream);
    }
    if (params.flipped) return launch_tile<DirectConfig<kTile, true>>(params, stream);
    launch_tile<DirectConfig<kTile, false>>(params, stream);
  }
}

}  // namespace

void launch_conv2d_direct(const Conv2dParams& params, cudaStream_t stream) {
  dispatch_size(params, stream);
}

}  // namespace torchweld
