// Convolution in 16 bits with small kernels, on tensor cores, without shared memory for x.
//
// A cell is 4 rows by 8 columns of 16-bit elements. Four lanes hold a cell: each lane holds one
// row, that is, 16 bytes or four pairs of neighbouring columns. Loads of x and stores of z have
// this layout. Operand A of m16n8k16 has this layout, too. For cell g of the warp (0 to 7) and one
// lane:
//   pair of columns  0            1                2             3
//   place in A       row g, k0-7  row g + 8, k0-7  row g, k8-15  row g + 8, k8-15
// Operand B is a band matrix of weights. Each 8 x 8 half of B multiplies one pair of columns of x
// and adds to one pair of columns of z, in 4 rows: k % 8 is 2 * (row of x) + (column in the pair of
// x), and n is 2 * (row of z) + (column in the pair of z). An output is the sum of two
// accumulators, one for the even and one for the odd pairs of x. The sums of a lane are 16 bytes of
// z.
//
// A strip is a column of cells. A warp computes several strips, which lie side by side or in
// different images. It computes them from top to bottom, while the loads of the next cells are in
// flight. A cell of z depends on the cell of x at the same place, on the cells of x below, and on
// the cells of x to the right. Neighbouring lanes hold the cells to the right. For the gradient
// with respect to x (flipped), strips run from bottom to top, and a cell depends on the cells to
// the left.
// NOTE: the zeros of the band are multiplied by values outside an output's window, and 0 * inf is
// NaN. Therefore an output that is not finite is recomputed from its own window.
#pragma once

#include <type_traits>

#include "device/dispatch.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {

constexpr int kCellTiles = 5;  // number of accumulator tiles; multiply_side says what they hold

template <typename T_, int kTile, bool kFlipped_>
struct CellsConfig {
  using T = T_;
  static constexpr CellsTile kShape = kCellsTiles[kTile];
  static constexpr int kSize = kShape.size;
  static constexpr bool kFlipped = kFlipped_;
  // The maximum number of cells that a window covers vertically.
  static constexpr int kDown = (kSize + 2) / kCellRows + 1;
  static constexpr int kBands = (kSize + 1) / 2;  // number of pairs of columns that a window covers
  // The number of words that a lane loads from its row of the neighbouring cell.
  static constexpr int kBeside = kBands > 3 ? 4 : 2;
  static constexpr int kBuffers = kDown + kShape.ahead;
  // The number of blocks per SM. It is lower if single elements are loaded, because the predicates
  // of such loads need registers.
  static constexpr int blocks_per_sm(bool vector) {
    return vector ? kShape.blocks_per_sm : kShape.blocks_per_sm / 2 + 1;
  }
  static_assert(sizeof(T) == 2 && kShape.strip_rows % kCellsMinRows == 0 &&
                kCellsMinRows % kCellRows == 0);
};

// A strip of cells, as one of its four lanes sees it. The lane holds one row of each cell.
template <typename T>
struct Strip {
  const T* g_x;      // address of the lane's row in the next cell of x
  T* g_z;            // address of the lane's row in the next cell of z
  int rows;          // number of rows of x that the lane needs, from its first row on
  bool beside;       // whether the image continues in the neighbouring cell
  bool outermost;    // whether no lane of the warp holds the neighbouring cell
  int columns;       // number of columns of the image from the strip's first column on
  int columns_left;  // number of columns of the image before the strip
};

struct CellsPlan {
  int log_across;  // log2 of the number of strips side by side, at most 3
  int steps;       // the number of cells in a strip
};

template <typename Config>
__device__ __forceinline__ Strip<typename Config::T> find_strip(
    const Conv2dArgs<typename Config::T>& args, const CellsPlan& plan) {
  const int lane = threadIdx.x % kWarp;
  const int64_t item = (args.first_block + blockIdx.x) * kCellsWarps + threadIdx.x / kWarp;
  const int64_t group = args.by_column_tiles.divide(item);
  const int64_t tile = item - group * args.by_column_tiles.divisor();
  const int cell = lane / 4, row = lane % 4;
  const int64_t column =
      ((tile << plan.log_across) + (cell & ((1 << plan.log_across) - 1))) * kCellColumns;
  const int log_units = 3 - plan.log_across;
  const int64_t unit = (group << log_units) + (cell >> plan.log_across);
  const int64_t image = args.by_image.divide(unit);
  const int rows = plan.steps * kCellRows;
  const int64_t first = (unit - image * args.by_image.divisor()) * rows;
  if (image >= args.batch || column >= args.width) {
    return {args.g_x, args.g_z, 0, false, true, 0, 0};
  }
  const int64_t i = Config::kFlipped ? args.height - 1 - first - row : first + row;
  const auto clamped = [](int64_t n, int limit) { return n < limit ? static_cast<int>(n) : limit; };
  const int below = clamped(args.height - first, rows + Config::kSize - 1) - row;
  const int last = (1 << plan.log_across) - 1;
  const bool beside = Config::kFlipped ? column > 0 : column + kCellColumns < args.width;
  return {args.g_x + image * args.x_batch_stride + i * args.x_row_stride + column,
          args.g_z + (image * args.height + i) * args.width + column,
          below,
          beside,
          (cell & last) == (Config::kFlipped ? 0 : last),
          clamped(args.width - column, 2 * kCellColumns),
          clamped(column, kCellColumns)};
}

// Loads kCount pairs of columns. The first pair is at g_row. Sets columns outside the image to
// zero.
template <bool kVector, int kCount, typename T>
__device__ __forceinline__ void load_pairs(uint32_t (&r_words)[kCount], const T* g_row, bool valid,
                                           int columns) {
  if constexpr (kVector && kCount == 4) {
    uint4 in = {};
    if (valid) in = __ldg(reinterpret_cast<const uint4*>(g_row));
    r_words[0] = in.x, r_words[1] = in.y, r_words[2] = in.z, r_words[3] = in.w;
  } else if constexpr (kVector) {
    uint2 in = {};
    if (valid) in = __ldg(reinterpret_cast<const uint2*>(g_row));
    r_words[0] = in.x, r_words[1] = in.y;
  } else {
    const auto value = [&](int c) -> uint32_t {
      return valid && c < columns ? __ldg(reinterpret_cast<const uint16_t*>(g_row) + c) : 0;
    };
#pragma unroll
    for (int i = 0; i < kCount; ++i) r_words[i] = value(2 * i) | value(2 * i + 1) << 16;
  }
}

// The lane's row of a cell, and its row of the neighbouring cell.
template <typename Config>
struct CellRow {
  static constexpr int kBeside = Config::kBeside;
  uint32_t words[4], beside[kBeside];

  // Loads the lane's row of a cell. With vector loads, only the outermost lanes also load their row
  // of the neighbouring cell. The other lanes receive this row from another lane in exchange().
  template <bool kVector>
  __device__ __forceinline__ void load(const Strip<typename Config::T>& strip, int row) {
    const bool loads_beside = !kVector || strip.outermost;
    load_pairs<kVector>(words, strip.g_x, row < strip.rows, strip.columns);
    load_pairs<kVector>(beside, strip.g_x + (Config::kFlipped ? -2 * kBeside : kCellColumns),
                        row < strip.rows && strip.beside && loads_beside,
                        Config::kFlipped ? kCellColumns : strip.columns - kCellColumns);
  }
  // Exchanges loaded words between lanes. All lanes of the warp must call this function.
  template <bool kVector>
  __device__ __forceinline__ void exchange(const Strip<typename Config::T>& strip) {
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kBeside; ++i) {
        const uint32_t received = Config::kFlipped ? __shfl_up_sync(~0u, words[i + 4 - kBeside], 4)
                                                   : __shfl_down_sync(~0u, words[i], 4);
        if (!strip.outermost) beside[i] = received;
      }
    }
  }
  // Returns word i of the cell's row (side 0) or of the neighbouring cell's row (side 1). Only the
  // loaded words of the neighbouring cell are valid.
  __device__ __forceinline__ uint32_t word(int side, int i) const {
    if (side == 0) return words[i];
    return beside[Config::kFlipped ? i - (4 - kBeside) : i];
  }
};

// The weights and a margin of zeros, in shared memory. The table starts at (p, q) = (-kMargin, -1).
template <typename Config>
struct WeightTable {
  static constexpr int kMargin = kCellRows - 1;
  static constexpr int kPitch = 16;
  static constexpr int kEntries = kPitch * (kCellRows * Config::kDown + kMargin);
  static constexpr int kPerThread = (kEntries + kCellsThreads - 1) / kCellsThreads;
  static_assert(2 * Config::kBands + 1 <= kPitch);
  uint16_t s_weights[kPerThread * kCellsThreads];

  // Loads this thread's weights into registers. store() writes them to shared memory later.
  static __device__ __forceinline__ void load(uint16_t (&r_weights)[kPerThread],
                                              const Conv2dArgs<typename Config::T>& args) {
    const int kernel_height = static_cast<int>(args.kernel_height);
    const int kernel_width = static_cast<int>(args.kernel_width);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int entry = threadIdx.x + i * kCellsThreads;
      const int p = entry / kPitch - kMargin, q = entry % kPitch - 1;
      const bool valid = p >= 0 && p < kernel_height && q >= 0 && q < kernel_width;
      const auto* g_weight = reinterpret_cast<const uint16_t*>(args.g_weight);
      r_weights[i] = valid ? __ldg(g_weight + p * kernel_width + q) : uint16_t{0};
    }
  }
  __device__ __forceinline__ void store(const uint16_t (&r_weights)[kPerThread]) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) s_weights[threadIdx.x + i * kCellsThreads] = r_weights[i];
  }
  // Reads the lane's words of the band matrices. r_band[d][i] maps a pair of columns of x to a pair
  // of columns of z. Seen from the pair of z, the pair of x lies d cells below and i pairs to the
  // right (to the left if kFlipped).
  __device__ __forceinline__ void read(uint32_t (&r_band)[Config::kDown][Config::kBands]) const {
    const int lane = threadIdx.x % kWarp;
    const int down = lane % 4 - lane / 8;  // the distance from a row of z to a row of x
    const int odd = lane / 4 % 2;          // index of the column of z in its pair
    const uint16_t* s_first =
        s_weights + (kMargin + down) * kPitch + 1 + (Config::kFlipped ? odd : -odd);
#pragma unroll
    for (int d = 0; d < Config::kDown; ++d) {
#pragma unroll
      for (int i = 0; i < Config::kBands; ++i) {
        const uint16_t* s_low = s_first + d * kCellRows * kPitch + 2 * i;
        r_band[d][i] = s_low[0] | uint32_t{s_low[Config::kFlipped ? -1 : 1]} << 16;
      }
    }
  }
};

// Accumulates the products of the cell (kSide 0) or of the neighbouring cell (kSide 1):
//   rows 0 to 7 of accumulator tile o    what the even pairs of x add to pair o - 1 of z
//   rows 8 to 15 of accumulator tile o   what the odd pairs of x add to pair o of z
// A cell of z has pairs 0 to 3, so tile 0 uses only rows 8 to 15, and tile 4 uses only rows 0 to 7.
template <typename Config, int kSide, typename Word>
__device__ __forceinline__ void multiply_side(float (&r_acc)[kCellTiles][4], const Word& word,
                                              const uint32_t (&r_band)[Config::kBands]) {
#pragma unroll
  for (int tile = 0; tile < kCellTiles; ++tile) {
    // The distances from the tile's pair of z to the first pair and to the third pair of x.
    const int to_right = 4 * kSide - (tile - 1);
    const int first = Config::kFlipped ? 4 * kSide + tile - 1 : to_right;
    const int third = Config::kFlipped ? first - 2 : first + 2;
    const bool has_first = first >= 0 && first < Config::kBands;
    const bool has_third = third >= 0 && third < Config::kBands;
    if (has_first && has_third) {
      const uint32_t r_a[4] = {word(0), word(1), word(2), word(3)};
      mma_16816<typename Config::T>(r_acc[tile], r_a, r_band[first], r_band[third]);
    } else if (has_first || has_third) {
      const int from = has_first ? 0 : 2;
      mma_1688<typename Config::T>(r_acc[tile], word(from), word(from + 1),
                                   r_band[has_first ? first : third]);
    }
  }
}

// Accumulates the products of the weights with a cell and with its neighbouring cell.
template <typename Config>
__device__ __forceinline__ void multiply_cell(float (&r_acc)[kCellTiles][4],
                                              const CellRow<Config>& cell,
                                              const uint32_t (&r_band)[Config::kBands]) {
  multiply_side<Config, 0>(r_acc, [&](int i) { return cell.word(0, i); }, r_band);
  multiply_side<Config, 1>(r_acc, [&](int i) { return cell.word(1, i); }, r_band);
}

// Sets `check` to a non-zero value if one of the two values in `word` is not finite.
template <typename T>
__device__ __forceinline__ void check_finite(uint32_t& check, uint32_t word) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const uint32_t zero = 0;
  const Pair sum =
      __hfma2(*reinterpret_cast<const Pair*>(&word), *reinterpret_cast<const Pair*>(&zero),
              *reinterpret_cast<const Pair*>(&check));
  check = *reinterpret_cast<const uint32_t*>(&sum);
}

// Rounds the lane's row of a cell of z to 16 bits and stores it.
template <typename Config, bool kVector>
__device__ __forceinline__ void store_cell(const Strip<typename Config::T>& strip,
                                           const float (&r_acc)[kCellTiles][4], bool valid,
                                           uint32_t& check) {
  using T = typename Config::T;
  uint32_t r_z[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    r_z[i] = pack_pair<T>(r_acc[i + 1][0] + r_acc[i][2], r_acc[i + 1][1] + r_acc[i][3]);
    check_finite<T>(check, r_z[i]);
  }
  if (!valid) return;
  if constexpr (kVector) {
    __stwb(reinterpret_cast<uint4*>(strip.g_z), make_uint4(r_z[0], r_z[1], r_z[2], r_z[3]));
  } else {
    auto* g_z = reinterpret_cast<uint16_t*>(strip.g_z);
#pragma unroll
    for (int c = 0; c < kCellColumns; ++c) {
      if (c < strip.columns) g_z[c] = static_cast<uint16_t>(r_z[c / 2] >> c % 2 * 16);
    }
  }
}

// Recomputes outputs of the lane in `steps` cells of a strip. If `all` is false, only outputs that
// are not finite are recomputed. Each output is computed from its own window.
template <typename Config>
__device__ __forceinline__ void recompute_strip(const Conv2dArgs<typename Config::T>& args,
                                                const Strip<typename Config::T>& strip, int steps,
                                                bool all) {
  using T = typename Config::T;
  constexpr int kDirection = Config::kFlipped ? -1 : 1;
  for (int row = 0; row < steps * kCellRows && row < strip.rows; row += kCellRows) {
    for (int c = 0; c < kCellColumns && c < strip.columns; ++c) {
      T& z = strip.g_z[kDirection * row * args.width + c];
      if (!all && isfinite(to_float(z))) continue;
      float sum = 0.f;
      for (int p = 0; p < args.kernel_height; ++p) {
        const T* g_row = strip.g_x + kDirection * (row + p) * args.x_row_stride + c;
        const int columns = Config::kFlipped ? strip.columns_left + c + 1 : strip.columns - c;
        for (int q = 0; q < args.kernel_width; ++q) {
          const bool valid = row + p < strip.rows && q < columns;
          sum = fmaf(to_float(args.g_weight[p * args.kernel_width + q]),
                     valid ? to_float(g_row[kDirection * q]) : 0.f, sum);
        }
      }
      z = from_float<T>(sum);
    }
  }
}

template <typename Config, bool kVector>
__global__
__launch_bounds__(kCellsThreads, Config::blocks_per_sm(kVector)) void conv2d_cells_kernel(
    const Conv2dArgs<typename Config::T> args, const CellsPlan plan) {
  using T = typename Config::T;
  constexpr int kBuffers = Config::kBuffers;
  __shared__ WeightTable<Config> table;
  uint16_t r_weights[WeightTable<Config>::kPerThread];
  WeightTable<Config>::load(r_weights, args);

  const int64_t x_step = (Config::kFlipped ? -kCellRows : kCellRows) * args.x_row_stride;
  const int64_t z_step = (Config::kFlipped ? -kCellRows : kCellRows) * args.width;
  Strip<T> strip = find_strip<Config>(args, plan);
  CellRow<Config> cells[kBuffers];
  const auto load = [&](int buffer, int step) {
    cells[buffer].template load<kVector>(strip, step * kCellRows);
    strip.g_x += x_step;
  };
#pragma unroll
  for (int step = 0; step < kBuffers - 1; ++step) load(step, step);
  uint32_t r_band[Config::kDown][Config::kBands];
#pragma unroll
  for (int d = 0; d < Config::kDown - 1; ++d) cells[d].template exchange<kVector>(strip);
  table.store(r_weights);
  __syncthreads();
  table.read(r_band);

  uint32_t check = 0;
  const auto compute = [&] {
    for (int first = 0;; first += kBuffers) {
#pragma unroll
      for (int u = 0; u < kBuffers; ++u) {
        const int step = first + u;
        // NOTE: this is a return, not a break. After a break, the control flow would merge with
        // other paths. At the merge, the compiler would move the cells in flight to other
        // registers, so it would wait for their loads.
        if (step >= plan.steps) return;
        load((u + kBuffers - 1) % kBuffers, step + kBuffers - 1);
        float r_acc[kCellTiles][4] = {};
        cells[(u + Config::kDown - 1) % kBuffers].template exchange<kVector>(strip);
#pragma unroll
        for (int d = 0; d < Config::kDown; ++d) {
          multiply_cell<Config>(r_acc, cells[(u + d) % kBuffers], r_band[d]);
        }
        store_cell<Config, kVector>(strip, r_acc, step * kCellRows < strip.rows, check);
        strip.g_z += z_step;
      }
    }
  };
  compute();
  if ((check & 0x7fff7fff) != 0) {
    recompute_strip<Config>(args, find_strip<Config>(args, plan), plan.steps, false);
  }
}

template <typename Config>
void launch_cells_config(const Conv2dParams& params, cudaStream_t stream) {
  using T = typename Config::T;
  const int64_t rows = cells_strip_rows(Config::kShape, params.batch, params.height, params.width);
  CellsPlan plan = {0, static_cast<int>(rows / kCellRows)};
  while (plan.log_across < 3 && (int64_t{kCellColumns} << plan.log_across) < params.width) {
    ++plan.log_across;
  }
  const int64_t tile_columns = int64_t{kCellColumns} << plan.log_across;
  const int64_t column_tiles = (params.width + tile_columns - 1) / tile_columns;
  const int64_t per_image = (params.height + rows - 1) / rows;
  const int64_t units = 8 >> plan.log_across;  // number of groups of side-by-side strips per warp
  const int64_t items = (params.batch * per_image + units - 1) / units * column_tiles;
  for_each_grid(conv2d_args<T>(params, column_tiles, per_image),
                (items + kCellsWarps - 1) / kCellsWarps,
                [&](const Conv2dArgs<T>& args, int64_t blocks) {
                  const auto kernel = args.aligned ? conv2d_cells_kernel<Config, true>
                                                   : conv2d_cells_kernel<Config, false>;
                  launch_kernel(kernel, {blocks, kCellsThreads}, stream, args, plan);
                });
}

// The kernel for contiguous images of 8 columns and up to kNarrowHeight rows. In such an image, a
// cell has no neighbouring cell and at most one cell below it.
//
// A warp first loads all its images. One load instruction loads 8 cells, for example four images of
// 8 rows, which are 512 contiguous bytes. In the warp, the four lanes of an image's lower cell
// follow the four lanes of its upper cell. The lanes hold the rows of an image in the order in
// which the kernel computes them. NOTE: the kernel skips the products of the weights with the zeros
// of the padding, although such a product is NaN if the weight is inf or NaN. Therefore, if a
// weight is not finite, every output is recomputed.
constexpr int kNarrowLoads = 4;
constexpr int kNarrowImages = 4;  // the number of images per load
constexpr int kNarrowWarpImages = kNarrowLoads * kNarrowImages;
static_assert(kNarrowHeight == 2 * kCellRows && kWarp == kNarrowImages * kNarrowHeight);

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
  const int height = static_cast<int>(args.height);
  const int64_t first_image =
      ((args.first_block + blockIdx.x) * kCellsWarps + threadIdx.x / kWarp) * kNarrowWarpImages;
  const int64_t left = args.batch - first_image;
  const int images = left < kNarrowWarpImages ? static_cast<int>(left) : kNarrowWarpImages;
  const auto valid = [&](int i) { return i * kNarrowImages + image < images && row < height; };
  const int image_row = Config::kFlipped ? height - 1 - row : row;
  const int64_t first = (first_image * height + image * height + image_row) * kCellColumns;
  const auto strip = [&](int i) -> Strip<T> {
    const int64_t offset = first + i * kNarrowImages * height * kCellColumns;
    return {args.g_x + offset, args.g_z + offset, height - row, false, true, kCellColumns, 0};
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
void launch_narrow_config(const Conv2dParams& params, cudaStream_t stream) {
  constexpr int64_t kImages = kCellsWarps * kNarrowWarpImages;
  using Args = Conv2dArgs<typename Config::T>;
  for_each_grid(conv2d_args<typename Config::T>(params, 1, 1),
                (params.batch + kImages - 1) / kImages, [&](const Args& args, int64_t blocks) {
                  launch_kernel(conv2d_narrow_kernel<Config>, {blocks, kCellsThreads}, stream,
                                args);
                });
}

// Launches the kernel for a tile. The tile must be large enough for the convolution kernel.
template <typename T>
void launch_conv2d_cells_of(int tile, const Conv2dParams& params, cudaStream_t stream) {
  const bool narrow =
      params.width == kCellColumns && params.height <= kNarrowHeight && params.contiguous();
  dispatch_index<kNumCellsTiles>(tile, [&](auto index) {
    const auto launch = [&](auto flipped) {
      using Config = CellsConfig<T, index.value, flipped.value>;
      if constexpr (index.value < kNumNarrowTiles) {
        if (narrow) return launch_narrow_config<Config>(params, stream);
      }
      launch_cells_config<Config>(params, stream);
    };
    params.flipped ? launch(std::true_type()) : launch(std::false_type());
  });
}

}  // namespace torchweld
