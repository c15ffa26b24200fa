// Convolution in fp32 with small square kernels, in registers.
//
// A thread computes 4 contiguous columns of a strip. It reads the rows of x from top to bottom,
// while the loads of the next rows are in flight. For a row of x, it adds the products with the
// weights to the rows of outputs that depend on this row. The number of these rows is the height of
// the convolution kernel. The windows of neighbouring threads overlap, so loads of the shared
// columns hit L1. The registers hold the weights, the window in a few rows of x, and a few rows of
// sums. A block has up to 32 threads side by side. The other threads of the block compute the
// strips below and the next images, so that small images fill a block. small_kernels.cu has another
// kernel for contiguous images of 8 columns.
#include "device/dispatch.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

template <int kTile, bool kFlipped_>
struct DirectConfig {
  static constexpr DirectTile kShape = kDirectTiles[kTile];
  static constexpr int kSize = kShape.size;
  static constexpr int kBuffers = kShape.buffers;
  static constexpr int kAhead = kShape.ahead;
  // The number of blocks per SM. It is lower if single elements are loaded, because the predicates
  // of such loads need registers.
  static constexpr int blocks_per_sm(bool vector) {
    return vector ? kShape.blocks_per_sm : kShape.blocks_per_sm / 2;
  }
  static constexpr bool kFlipped = kFlipped_;
  static constexpr int kElems = kDirectColumns;
  // The window of a thread in a row of x. The window consists of whole vectors and starts kBefore
  // columns before the thread's first output.
  static constexpr int kAccesses = 1 + (kSize - 1 + kElems - 1) / kElems;
  static constexpr int kWindow = kAccesses * kElems;
  static constexpr int kBefore = kFlipped ? (kAccesses - 1) * kElems : 0;
  static constexpr int kShift = kFlipped ? kBefore - (kSize - 1) : 0;
  static constexpr int kRowsBefore = kFlipped ? kSize - 1 : 0;
  // kOutermost is the index of the outermost vector of the window. kUnseen is the number of
  // elements of this vector that are not used.
  static constexpr int kOutermost = kFlipped ? 0 : kAccesses - 1;
  static constexpr int kUnseen = kWindow - kElems - (kSize - 1);
  static_assert(kElems * sizeof(float) == kVectorBytes && kSize <= kBuffers && kAhead <= kBuffers);
};

// The clamped distances from a thread's first output to the bounds of the image.
struct DirectBounds {
  // rows_above is the number of image rows above the output's row. rows_below is the number of
  // image rows from the output's row on.
  int rows_above, rows_below;
  // columns_left is the number of image columns left of the output's column. columns_right is the
  // number of image columns from the output's column on.
  int columns_left, columns_right;
};

__device__ __forceinline__ int clamped(int64_t distance) {
  return static_cast<int>(distance < 1024 ? distance : 1024);
}

// Loads three elements of a vector: the last three if kLast is true, else the first three. The
// other element of the vector becomes 0.
// NOTE: if all four elements are loaded, the compiler reuses the register of the unused element,
// and this reuse waits for the load. On an H200, the kernel then needed 1.23 times the time of a
// copy, instead of 1.08 times. Inline PTX prevents the compiler from loading all four elements.
template <bool kLast>
__device__ __forceinline__ Vec<float, 4> load_three(const float* g_from) {
  Vec<float, 4> in = {};
  const auto* g_two = reinterpret_cast<const float2*>(g_from + (kLast ? 2 : 0));
  const float2 two = *g_two;
  asm volatile("ld.global.f32 %0, [%1];"
               : "=f"(in.values[kLast ? 1 : 2])
               : "l"(g_from + (kLast ? 1 : 2)));
  in.values[kLast ? 2 : 0] = two.x;
  in.values[kLast ? 3 : 1] = two.y;
  return in;
}

// Loads the window of a row. Columns outside the image become zeros.
template <typename Config, bool kVector>
__device__ __forceinline__ void load_window(float (&r_x)[Config::kWindow], const float* g_row,
                                            bool valid, const DirectBounds& bounds) {
  constexpr int kElems = Config::kElems;
#pragma unroll
  for (int a = 0; a < Config::kAccesses; ++a) {
    const int first = a * kElems - Config::kBefore;
    if constexpr (kVector) {
      // The vector with the outputs' columns is always inside the image.
      const bool inside =
          first == 0 || (first < 0 ? -first <= bounds.columns_left : first < bounds.columns_right);
      Vec<float, kElems> in = {};
      if (valid && inside) {
        if constexpr (Config::kUnseen == 1) {
          in = a == Config::kOutermost ? load_three<Config::kFlipped>(g_row + first)
                                       : load_vec<float, kElems>(g_row + first);
        } else {
          in = load_vec<float, kElems>(g_row + first);
        }
      }
#pragma unroll
      for (int c = 0; c < kElems; ++c) r_x[a * kElems + c] = in.values[c];
    } else {
#pragma unroll
      for (int c = 0; c < kElems; ++c) {
        const int column = first + c;
        const bool inside = column >= -bounds.columns_left && column < bounds.columns_right;
        r_x[a * kElems + c] = valid && inside ? g_row[column] : 0.f;
      }
    }
  }
}

// Adds the products of a row of x to the outputs that depend on this row. `buffer` is the index of
// the row in the strip, modulo kBuffers. kFirst must be true for the first kBuffers rows of the
// strip, because fewer outputs depend on these rows.
template <typename Config, bool kFirst>
__device__ __forceinline__ void add_row(float (&r_z)[Config::kBuffers][Config::kElems],
                                        const float (&r_x)[Config::kWindow], int buffer,
                                        const float (&r_weight)[Config::kSize][Config::kSize]) {
  constexpr int kSize = Config::kSize, kBuffers = Config::kBuffers;
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
    if (kFirst && p > buffer) continue;
    float (&r_sum)[Config::kElems] = r_z[(buffer - p + kBuffers) % kBuffers];
#pragma unroll
    for (int q = 0; q < kSize; ++q) {
#pragma unroll
      for (int c = 0; c < Config::kElems; ++c) {
        const float x = r_x[Config::kShift + q + c];
        r_sum[c] = p == 0 && q == 0 ? r_weight[p][q] * x : fmaf(r_weight[p][q], x, r_sum[c]);
      }
    }
  }
}

template <typename Config, bool kVector>
__device__ __forceinline__ void store_row(float* g_z, const float (&r_z)[Config::kElems],
                                          const DirectBounds& bounds) {
  if constexpr (kVector) {
    store_floats(g_z, r_z);
  } else {
#pragma unroll
    for (int c = 0; c < Config::kElems; ++c) {
      if (c < bounds.columns_right) g_z[c] = r_z[c];
    }
  }
}

template <typename Config, bool kVector>
__global__ __launch_bounds__(
    kDirectThreads,
    Config::blocks_per_sm(kVector)) void conv2d_direct_kernel(const Conv2dArgs<float> args,
                                                              int log_across, int rows) {
  constexpr int kSize = Config::kSize, kBuffers = Config::kBuffers;
  constexpr int kAhead = kVector ? Config::kAhead : 1;
  constexpr int kElems = Config::kElems;
  const int64_t block = args.first_block + blockIdx.x;
  const int64_t row_tile = args.by_column_tiles.divide(block);
  const int64_t column_tile = block - row_tile * args.by_column_tiles.divisor();
  const int across = threadIdx.x & ((1 << log_across) - 1);
  const int64_t unit = (row_tile << (7 - log_across)) + (threadIdx.x >> log_across);
  static_assert(kDirectThreads == 1 << 7);
  const int64_t image = args.by_image.divide(unit);
  const int64_t i = (unit - image * args.by_image.divisor()) * rows;
  const int64_t j = ((column_tile << log_across) + across) * kElems;
  if (image >= args.batch || j >= args.width) return;
  const DirectBounds bounds = {clamped(i), clamped(args.height - i), clamped(j),
                               clamped(args.width - j)};
  const int outputs = bounds.rows_below < rows ? bounds.rows_below : rows;
  // [first_valid, behind) is the range of rows of x that lie inside the image. Row 0 is the first
  // row of the strip's window.
  const int first_valid = Config::kRowsBefore - bounds.rows_above;
  const int seen = outputs + kSize - 1;
  const int below = Config::kRowsBefore + bounds.rows_below;
  const int behind = seen < below ? seen : below;

  const float* g_x =
      args.g_x + image * args.x_batch_stride + (i - Config::kRowsBefore) * args.x_row_stride + j;
  float* g_z = args.g_z + (image * args.height + i) * args.width + j;
  float r_x[kBuffers][Config::kWindow];
  const auto load = [&](int buffer, int step, bool may_be_above) {
    const bool valid = step < behind && (!may_be_above || step >= first_valid);
    load_window<Config, kVector>(r_x[buffer], g_x, valid, bounds);
    g_x += args.x_row_stride;
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step, step, step < Config::kRowsBefore);

  float r_weight[kSize][kSize];
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
#pragma unroll
    for (int q = 0; q < kSize; ++q) {
      const int tap = p * kSize + q;
      r_weight[p][q] = __ldg(args.g_weight + (Config::kFlipped ? kSize * kSize - 1 - tap : tap));
    }
  }

  float r_z[kBuffers][kElems];
  // Whether the load of the next row is issued before the current row is added. If all buffers have
  // loads in flight, a buffer can be reloaded only after its row is added.
  constexpr bool kLoadBefore = kAhead < kBuffers;
#pragma unroll
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    const int next = buffer + kAhead;
    if (kLoadBefore) load(next % kBuffers, next, next < Config::kRowsBefore);
    add_row<Config, true>(r_z, r_x[buffer], buffer, r_weight);
    if (!kLoadBefore) load(buffer, next, false);
  }
  store_row<Config, kVector>(g_z, r_z[0], bounds);
#pragma unroll 1
  for (int done = 1;; done += kBuffers) {
#pragma unroll
    for (int buffer = 0; buffer < kBuffers; ++buffer) {
      // NOTE: this is a return, not a break. After a break, the control flow would merge with other
      // paths. At the merge, the compiler would move the rows in flight to other registers, so it
      // would wait for their loads.
      if (done + buffer >= outputs) return;
      const int next = done + buffer + kBuffers - 1 + kAhead;
      if (kLoadBefore) load((buffer + kAhead) % kBuffers, next, false);
      add_row<Config, false>(r_z, r_x[buffer], buffer, r_weight);
      if (!kLoadBefore) load(buffer, next, false);
      g_z += args.width;
      store_row<Config, kVector>(g_z, r_z[(buffer + 1) % kBuffers], bounds);
    }
  }
}

template <typename Config>
void launch_tile(const Conv2dParams& params, cudaStream_t stream) {
  int log_across = 0;
  while (log_across < 5 && (int64_t{kDirectColumns} << log_across) < params.width) ++log_across;
  const int64_t tile_columns = int64_t{kDirectColumns} << log_across;
  const int64_t column_tiles = (params.width + tile_columns - 1) / tile_columns;
  const int64_t rows = direct_strip_rows(Config::kShape, params.batch, params.height, params.width);
  const int64_t per_image = (params.height + rows - 1) / rows;
  const int64_t below = kDirectThreads >> log_across;
  const int64_t row_tiles = (params.batch * per_image + below - 1) / below;
  for_each_grid(conv2d_args<float>(params, column_tiles, per_image), column_tiles * row_tiles,
                [&](const Conv2dArgs<float>& args, int64_t blocks) {
                  const auto kernel = args.aligned ? conv2d_direct_kernel<Config, true>
                                                   : conv2d_direct_kernel<Config, false>;
                  launch_kernel(kernel, {blocks, kDirectThreads}, stream, args, log_across,
                                static_cast<int>(rows));
                });
}

}  // namespace

void launch_conv2d_direct(const Conv2dParams& params, cudaStream_t stream) {
  if (params.width == kSmallColumns && params.height <= kSmallHeight && params.contiguous()) {
    return launch_conv2d_small(params, stream);
  }
  dispatch_index<kNumDirectTiles>(direct_tile(params.kernel_height), [&](auto tile) {
    if (params.flipped) return launch_tile<DirectConfig<tile.value, true>>(params, stream);
    launch_tile<DirectConfig<tile.value, false>>(params, stream);
  });
}

}  // namespace torchweld
