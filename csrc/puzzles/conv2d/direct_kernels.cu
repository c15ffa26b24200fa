// Convolution in fp32 with small square kernels, in registers.
//
// A thread has 4 adjacent columns of a strip. It walks down the rows of x that these need, with the
// windows of the next rows on their way (neighbours' windows overlap, and come from L1), and adds
// each to the size rows of outputs that see it. Windows and sums take turns in a few rows of
// registers, and the weights stay in registers too. A block's threads lie 32 or fewer across and go
// on below and in the next image, so that small images fill it too.
#include "device/dispatch.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

template <int kTile, bool kFlipped_>
struct DirectConfig {
  static constexpr DirectTile kShape = kDirectTiles[kTile];
  static constexpr int kSize = kShape.size;
  static constexpr int kTurns = kShape.turns;
  static constexpr int kAhead = kShape.ahead;
  // Single elements need more registers than accesses do: for their conditions.
  static constexpr int blocks_per_sm(bool vector) {
    return vector ? kShape.blocks_per_sm : kShape.blocks_per_sm / 2;
  }
  static constexpr bool kFlipped = kFlipped_;
  static constexpr int kElems = kDirectColumns;
  // The window of a row: whole accesses, from kBefore columns before the first output on.
  static constexpr int kAccesses = 1 + (kSize - 1 + kElems - 1) / kElems;
  static constexpr int kWindow = kAccesses * kElems;
  static constexpr int kBefore = kFlipped ? (kAccesses - 1) * kElems : 0;
  static constexpr int kShift = kFlipped ? kBefore - (kSize - 1) : 0;
  static constexpr int kRowsBefore = kFlipped ? kSize - 1 : 0;
  // The access that the window ends with, of which only a part may be seen.
  static constexpr int kOutermost = kFlipped ? 0 : kAccesses - 1;
  static constexpr int kUnseen = kWindow - kElems - (kSize - 1);
  static_assert(kElems * sizeof(float) == kVectorBytes && kSize <= kTurns && kAhead <= kTurns);
};

// What a thread has, relative to its first output; distances are clamped to what it can see.
struct DirectPlace {
  int rows_above, rows_below;       // rows of the image before and from the first output on
  int columns_left, columns_right;  // the same of columns
};

__device__ __forceinline__ int clamped(int64_t distance) {
  return static_cast<int>(distance < 1024 ? distance : 1024);
}

// Three values of an access, the last ones or the first ones; 0 in the fourth.
// NOTE: the register of a value that nobody reads is given to another one, which then waits for the
// access: 1.23 of a copy on an H200, instead of 1.08. Assembly, lest the compiler loads all four.
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

// The window of one row, zeros beyond the image.
template <typename Config, bool kVector>
__device__ __forceinline__ void load_window(float (&r_x)[Config::kWindow], const float* g_row,
                                            bool there, const DirectPlace& place) {
  constexpr int kElems = Config::kElems;
#pragma unroll
  for (int a = 0; a < Config::kAccesses; ++a) {
    const int first = a * kElems - Config::kBefore;
    if constexpr (kVector) {
      // The outputs' own columns are always there.
      const bool inside =
          first == 0 || (first < 0 ? -first <= place.columns_left : first < place.columns_right);
      Vec<float, kElems> in = {};
      if (there && inside) {
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
        const bool inside = column >= -place.columns_left && column < place.columns_right;
        r_x[a * kElems + c] = there && inside ? g_row[column] : 0.f;
      }
    }
  }
}

// Row `turn` of x, counted from the strip's first one and modulo kTurns: what it adds to the
// outputs that see it. kFirst: the strip's first kTurns rows, which fewer outputs see.
template <typename Config, bool kFirst>
__device__ __forceinline__ void add_row(float (&r_z)[Config::kTurns][Config::kElems],
                                        const float (&r_x)[Config::kWindow], int turn,
                                        const float (&r_weight)[Config::kSize][Config::kSize]) {
  constexpr int kSize = Config::kSize, kTurns = Config::kTurns;
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
    if (kFirst && p > turn) continue;
    float (&r_sum)[Config::kElems] = r_z[(turn - p + kTurns) % kTurns];
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
                                          const DirectPlace& place) {
  if constexpr (kVector) {
    store_floats(g_z, r_z);
  } else {
#pragma unroll
    for (int c = 0; c < Config::kElems; ++c) {
      if (c < place.columns_right) g_z[c] = r_z[c];
    }
  }
}

template <typename Config, bool kVector>
__global__ __launch_bounds__(
    kDirectThreads,
    Config::blocks_per_sm(kVector)) void conv2d_direct_kernel(const Conv2dArgs<float> args,
                                                              int log_across, int rows) {
  constexpr int kSize = Config::kSize, kTurns = Config::kTurns;
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
  const DirectPlace place = {clamped(i), clamped(args.height - i), clamped(j),
                             clamped(args.width - j)};
  const int outputs = place.rows_below < rows ? place.rows_below : rows;
  // Rows of x that are there and seen, from the first one that the strip sees on.
  const int first_there = Config::kRowsBefore - place.rows_above;
  const int seen = outputs + kSize - 1;
  const int below = Config::kRowsBefore + place.rows_below;
  const int behind = seen < below ? seen : below;

  const float* g_x =
      args.g_x + image * args.x_batch_stride + (i - Config::kRowsBefore) * args.x_row_stride + j;
  float* g_z = args.g_z + (image * args.height + i) * args.width + j;
  float r_x[kTurns][Config::kWindow];
  const auto load = [&](int turn, int step, bool may_be_above) {
    const bool there = step < behind && (!may_be_above || step >= first_there);
    load_window<Config, kVector>(r_x[turn], g_x, there, place);
    g_x += args.x_row_stride;
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step, step, step < Config::kRowsBefore);

  float r_weight[kSize][kSize];
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
#pragma unroll
    for (int q = 0; q < kSize; ++q) {
      const int at = p * kSize + q;
      r_weight[p][q] = __ldg(args.g_weight + (Config::kFlipped ? kSize * kSize - 1 - at : at));
    }
  }

  float r_z[kTurns][kElems];
  // A row's own place is free once it is added, any other one before.
  constexpr bool kLoadBefore = kAhead < kTurns;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int next = turn + kAhead;
    if (kLoadBefore) load(next % kTurns, next, next < Config::kRowsBefore);
    add_row<Config, true>(r_z, r_x[turn], turn, r_weight);
    if (!kLoadBefore) load(turn, next, false);
  }
  store_row<Config, kVector>(g_z, r_z[0], place);
#pragma unroll 1
  for (int done = 1;; done += kTurns) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      // NOTE: not break: where paths meet again the compiler copies rows that are on their way
      // to other registers, and waits for them there.
      if (done + turn >= outputs) return;
      const int next = done + turn + kTurns - 1 + kAhead;
      if (kLoadBefore) load((turn + kAhead) % kTurns, next, false);
      add_row<Config, false>(r_z, r_x[turn], turn, r_weight);
      if (!kLoadBefore) load(turn, next, false);
      g_z += args.width;
      store_row<Config, kVector>(g_z, r_z[(turn + 1) % kTurns], place);
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
  dispatch_index<kNumDirectTiles>(tile_of_size(kDirectTiles, params.kernel_height), [&](auto tile) {
    if (params.flipped) return launch_tile<DirectConfig<tile.value, true>>(params, stream);
    launch_tile<DirectConfig<tile.value, false>>(params, stream);
  });
}

}  // namespace torchweld
