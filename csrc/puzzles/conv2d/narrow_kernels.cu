// Convolution in 16 bits for images of 8 columns and up to 8 rows, on tensor cores, with the cells
// of puzzles/conv2d/cells.cuh. In such an image, a cell has no neighbouring cell and at most one
// cell below it.
//
// A warp first loads all its images. One load instruction loads 8 cells, for example four images of
// 8 rows, which are 512 contiguous bytes. In the warp, the four lanes of an image's lower cell
// follow the four lanes of its upper cell.
// NOTE: the zeros of the band are multiplied by values outside an output's window, and 0 * inf is
// NaN. Therefore an output that is not finite is recomputed. The kernel skips the products of the
// weights with the zeros of the padding, although such a product is NaN if the weight is inf or
// NaN. Therefore, if a weight is not finite, every output is recomputed.
#include "device/dispatch.cuh"
#include "puzzles/conv2d/cells.cuh"

namespace torchweld {
namespace {

constexpr int kNarrowLoads = 4;
constexpr int kNarrowImages = 4;  // the number of images per load
constexpr int kNarrowWarpImages = kNarrowLoads * kNarrowImages;

template <typename T, int kTile, bool kFlipped, bool kWhole_>
struct NarrowConfig : CellsConfig<T, kTile, kFlipped> {
  static constexpr bool kWhole = kWhole_;  // whether images have kNarrowHeight rows
  static_assert(kNarrowHeight == 2 * kCellRows && kWarp == kNarrowImages * kNarrowHeight);
};

// x and z must be contiguous. The lanes hold the rows of an image in the order in which the kernel
// computes them.
template <typename Config>
__global__ __launch_bounds__(kCellsThreads, Config::kShape.blocks_per_sm) void conv2d_narrow_kernel(
    const Conv2dArgs<typename Config::T> args) {
  using T = typename Config::T;
  using Table = WeightTable<Config>;
  __shared__ Table table;
  uint16_t r_weights[Table::kPerThread];
  Table::load(r_weights, args);

  const int lane = threadIdx.x % kWarp;
  const int image = lane / kNarrowHeight, row = lane % kNarrowHeight;
  const int height = Config::kWhole ? kNarrowHeight : static_cast<int>(args.height);
  const int64_t first_image =
      ((args.first_block + blockIdx.x) * kCellsWarps + threadIdx.x / kWarp) * kNarrowWarpImages;
  const int64_t left = args.batch - first_image;
  const int images = left < kNarrowWarpImages ? static_cast<int>(left) : kNarrowWarpImages;
  const auto valid = [&](int i) { return i * kNarrowImages + image < images && row < height; };
  const int image_row = Config::kFlipped ? height - 1 - row : row;
  const int64_t first = (first_image * height + image * height + image_row) * kCellColumns;
  const auto strip = [&](int i) -> Strip<T> {
    const int offset = i * kNarrowImages * height * kCellColumns;
    return {args.g_x + first + offset,
            args.g_z + first + offset,
            height - row,
            false,
            true,
            kCellColumns,
            0};
  };
  uint32_t r_x[kNarrowLoads][4];
#pragma unroll
  for (int i = 0; i < kNarrowLoads; ++i) {
    load_pairs<true>(r_x[i], strip(i).g_x, valid(i), kCellColumns);
  }

  uint32_t check = 0;
#pragma unroll
  for (int i = 0; i < Table::kPerThread; ++i) check_finite<T>(check, r_weights[i]);
  table.store(r_weights);
  const bool all = __syncthreads_or((check & 0x7fff7fff) != 0);
  uint32_t r_band[Config::kDown][Config::kBands];
  table.read(r_band);

  check = 0;
#pragma unroll
  for (int i = 0; i < kNarrowLoads; ++i) {
    float r_acc[kCellTiles][4] = {};
    multiply_side<Config, 0>(r_acc, [&](int w) { return r_x[i][w]; }, r_band[0]);
    uint32_t r_below[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t received = __shfl_down_sync(~0u, r_x[i][w], kCellRows);
      r_below[w] = row < kCellRows ? received : 0;
    }
    multiply_side<Config, 0>(r_acc, [&](int w) { return r_below[w]; }, r_band[1]);
    store_cell<Config, true>(strip(i), r_acc, valid(i), check);
  }
  if (!all && (check & 0x7fff7fff) == 0) return;
#pragma unroll 1
  for (int i = 0; i < kNarrowLoads; ++i) {
    if (valid(i)) recompute_strip<Config>(args, strip(i), 1, all);
  }
}

template <typename Config>
void launch_config(const Conv2dArgs<typename Config::T>& args, cudaStream_t stream) {
  constexpr int64_t kImages = kCellsWarps * kNarrowWarpImages;
  for_each_grid(args, (args.batch + kImages - 1) / kImages,
                [&](const Conv2dArgs<typename Config::T>& grid_args, int64_t blocks) {
                  launch_kernel(conv2d_narrow_kernel<Config>, {blocks, kCellsThreads}, stream,
                                grid_args);
                });
}

template <typename T, int kTile, bool kFlipped>
void launch_tile(const Conv2dArgs<T>& args, cudaStream_t stream) {
  if (args.height == kNarrowHeight) {
    return launch_config<NarrowConfig<T, kTile, kFlipped, true>>(args, stream);
  }
  launch_config<NarrowConfig<T, kTile, kFlipped, false>>(args, stream);
}

// Launches the kernel if x and z are contiguous and aligned, else returns false.
template <typename T>
bool launched(int tile, const Conv2dParams& params, cudaStream_t stream) {
  const Conv2dArgs<T> args = conv2d_args<T>(params, 1, 1);
  const bool contiguous =
      (params.height == 1 || params.x_row_stride == params.width) &&
      (params.batch == 1 || params.x_batch_stride == params.height * params.width);
  if (!args.aligned || !contiguous) return false;
  dispatch_index<kNumNarrowTiles>(tile, [&](auto index) {
    if (args.flipped) return launch_tile<T, index.value, true>(args, stream);
    launch_tile<T, index.value, false>(args, stream);
  });
  return true;
}

}  // namespace

void launch_conv2d_narrow(int tile, const Conv2dParams& params, cudaStream_t stream) {
  const bool half = params.dtype == DType::kFloat16;
  if (half ? launched<__half>(tile, params, stream)
           : launched<__nv_bfloat16>(tile, params, stream)) {
    return;
  }
  launch_conv2d_cells(tile, params, stream);
}

}  // namespace torchweld
