// Row softmax and its gradient under a mask, one read of every row that fits in registers.
//
//   y = softmax(scale * x) over the live columns of a row, 0 elsewhere      x, y (rows, n)
//   dx = scale * y * (dy - sum(dy * y)) over the live columns, 0 elsewhere
//
// Row kernels: kThreads threads hold one row (several rows a block when a warp is enough); each
// thread loads all its pieces, then the threads join (max, sum) once, then each stores its pieces.
// Stream kernels: rows too long for registers are read twice with a running (max, sum).
// A Mask tells the live columns of a row; columns outside are neither loaded nor waited for.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (the merge).
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/launch.h"
#include "core/mask.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/softmax/softmax_config.h"

namespace torchweld {

constexpr float kLog2e = 1.4426950408889634f;

// Everything is visible, scale 1.
struct NoMask {
  static constexpr bool kMasked = false;
  int64_t n;
  bool tiled(int64_t) const { return true; }
  __device__ __forceinline__ RowRange live_columns(int64_t) const {
    return {0, static_cast<int>(n)};
  }
  __device__ __forceinline__ LiveRange live(int64_t) const { return {0, n}; }
  __device__ __forceinline__ float scale() const { return 1.f; }
};

template <typename T_, int kTile>
struct RowConfig {
  using T = T_;
  static constexpr SoftmaxTile kShape = kSoftmaxTiles[kTile];
  static constexpr int kThreadsPerRow = kShape.threads;
  static constexpr int kLoads = kShape.loads;
  static constexpr int kElems = kShape.elems(sizeof(T));
  static constexpr int kCluster = kShape.cluster;
  // Single warps are independent: a block of four of them serves four rows.
  static constexpr int kThreads = kThreadsPerRow == kWarp ? 4 * kWarp : kThreadsPerRow;
  static constexpr int kRowsPerBlock = kThreads / kThreadsPerRow;
  static_assert(kThreads <= 1024 && kThreadsPerRow % kWarp == 0);
  static_assert(kCluster == 1 || (kRowsPerBlock == 1 && kThreadsPerRow > kWarp));
};

template <typename T>
struct RowArgs {
  const T* g_x;  // x, or y in the gradient
  const T* g_dy;
  T* g_y;  // y, or dx in the gradient
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  int64_t dy_row_stride;
  int64_t first_row;  // of this launch, where one grid can't hold all rows
};

// True when an access of `elems` columns from `first` on holds a live one.
template <typename Mask, typename Range, typename Column>
__device__ __forceinline__ bool touches(const Range& live, Column first, int elems) {
  if constexpr (!Mask::kMasked) return first < live.end;
  return first + elems > live.begin && first < live.end;
}

template <typename Range, typename Column>
__device__ __forceinline__ bool sees(const Range& live, Column column) {
  return column >= live.begin && column < live.end;
}

// An access of a streaming row as fp32 times `factor`, `hidden` where the mask hides.
template <typename Mask, typename T, int kElems>
__device__ __forceinline__ void unpack(float (&r_to)[kElems], const Vec<T, kElems>& from,
                                       const LiveRange& live, int64_t first, float factor,
                                       float hidden) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    r_to[j] = to_float(from.values[j]);
    if constexpr (Mask::kMasked) r_to[j] = sees(live, first + j) ? r_to[j] * factor : hidden;
  }
}

// Clears the columns that the mask hides in a result that is not finite elsewhere: 0 * NaN is NaN.
template <typename T, int kElems, typename Range, typename Column>
__device__ __forceinline__ void clear_hidden(Vec<T, kElems>& out, const Range& live, Column first) {
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    if (!sees(live, first + j)) out.values[j] = from_float<T>(0.f);
  }
}

// How scores become exponents: 2^((sign * x - max) * c). A scale of 0 multiplies the scores away,
// so that an infinite one is NaN as in torch.
template <typename T>
struct Exponent {
  float sign;
  float c;

  __device__ __forceinline__ explicit Exponent(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        c((scale == 0.f ? 1.f : fabsf(scale)) * kLog2e) {}

  // NOTE: results are 2^kBias times too large, which cancels in the division by their sum. It
  // keeps what would be subnormal in range of the one-instruction exponential; its rounding, 2^-19,
  // only suits 16-bit results.
  static constexpr float kBias = sizeof(T) == 2 ? 32.f : 0.f;

  __device__ __forceinline__ float operator()(float x, float max) const {
    if constexpr (sizeof(T) == 2) return exp2_approx_ftz(fmaf(x - max, c, kBias));
    return exp2_approx((x - max) * c);
  }
};

// -inf - (-inf) is NaN: a part that saw only -inf is compared with 0 instead and adds nothing.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// A thread's share of a row: access i starts at column(i). All accesses i of a row form chunk i, so
// whether a chunk holds anything live is the same for every thread of the row.
template <typename Config, typename Mask>
struct RowShare {
  static constexpr int kElems = Config::kElems;
  static constexpr int kChunk = Config::kThreadsPerRow * kElems;
  using Access = Vec<typename Config::T, kElems>;
  RowRange live;
  int lane;
  int start;  // the first column of this block's part of the row

  __device__ __forceinline__ explicit RowShare(const RowRange& range)
      : live(range),
        lane(Config::kRowsPerBlock == 1 ? threadIdx.x : threadIdx.x % Config::kThreadsPerRow),
        start(blockIdx.x % Config::kCluster * Config::kLoads * kChunk) {}

  static __device__ __forceinline__ int64_t row() {
    if constexpr (Config::kRowsPerBlock == 1) return blockIdx.x / Config::kCluster;
    return static_cast<int64_t>(blockIdx.x) * Config::kRowsPerBlock +
           threadIdx.x / Config::kThreadsPerRow;
  }
  __device__ __forceinline__ int column(int i) const { return start + i * kChunk + lane * kElems; }

  // Unmasked rows skip nothing: a tile's last chunks are seldom dead, and a branch costs more.
  __device__ __forceinline__ bool chunk_is_live(int i) const {
    return !Mask::kMasked ||
           (start + i * kChunk < live.end && start + (i + 1) * kChunk > live.begin);
  }

  // A live chunk's access, `hidden` where it holds nothing live.
  __device__ __forceinline__ void load(Access& r_to, const typename Config::T* g_row, int i,
                                       float hidden) const {
    if (touches<Mask>(live, column(i), kElems)) {
      r_to = load_vec<typename Config::T, kElems>(g_row + column(i));
    } else {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_to.values[j] = from_float<typename Config::T>(hidden);
    }
  }

  // The access as fp32, `hidden` where the mask hides a column.
  __device__ __forceinline__ void unpack(float (&r_to)[kElems], const Access& from, int i,
                                         float hidden) const {
#pragma unroll
    for (int j = 0; j < kElems; ++j) r_to[j] = to_float(from.values[j]);
    if constexpr (Mask::kMasked) {
      // Only the accesses at the two edges hold both kinds of columns.
      const int to_begin = live.begin - column(i), to_end = live.end - column(i);
      if ((to_begin > 0 && to_begin < kElems) || (to_end > 0 && to_end < kElems)) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) r_to[j] = j >= to_begin && j < to_end ? r_to[j] : hidden;
      }
    }
  }
};

template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kThreads) void softmax_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  using Share = RowShare<Config, Mask>;
  const int64_t row = Share::row();
  if (Config::kRowsPerBlock > 1 && row >= args.rows) return;
  const Share share(mask.live_columns(args.first_row + row));
  const Exponent<T> exponent(mask.scale());
  const float hidden = -exponent.sign * INFINITY;  // smaller than any score
  const T* g_x = args.g_x + row * args.x_row_stride;
  T* g_y = args.g_y + row * args.n;

  // Load: all accesses are in flight before the first value is used.
  Vec<T, kElems> r_in[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (share.chunk_is_live(i)) share.load(r_in[i], g_x, i, hidden);
  }

  // Compute: exponentials against the warp's own maximum, then one exchange between warps.
  float r_x[kLoads][kElems];
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (share.chunk_is_live(i)) {
      share.unpack(r_x[i], r_in[i], i, hidden);
      if (Mask::kMasked && exponent.sign < 0.f) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) r_x[i][j] = -r_x[i][j];
      }
#pragma unroll
      for (int j = 0; j < kElems; ++j) max = fmaxf(max, r_x[i][j]);
    }
  }
  max = warp_max(max);
  const float shift = finite_max(max);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (share.chunk_is_live(i)) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        r_x[i][j] = exponent(r_x[i][j], shift);
        sum += r_x[i][j];
      }
    }
  }
  MaxSum total = {max, warp_sum(sum)};
  if constexpr (Config::kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<Config::kThreads> s_exchange;
    total = s_exchange.merge_warps(total, exponent.c);
  }
  __shared__ ClusterExchange<Config::kCluster> s_cluster;
  total = s_cluster.merge_blocks(total, exponent.c);
  // A row of nothing but -inf is NaN as in torch: (-inf) - (-inf).
  const float factor = exp2_approx((max - total.max) * exponent.c) / total.sum;

  // Store, zeros outside the live range.
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    Vec<T, kElems> out = {};
    if (share.chunk_is_live(i)) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) out.values[j] = from_float<T>(r_x[i][j] * factor);
      if (Mask::kMasked && !isfinite(factor)) clear_hidden(out, share.live, share.column(i));
    }
    if (share.column(i) < args.n) store_vec(g_y + share.column(i), out);
  }
  s_cluster.finish();
}

template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kThreads) void softmax_backward_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  using Share = RowShare<Config, Mask>;
  const int64_t row = Share::row();
  if (Config::kRowsPerBlock > 1 && row >= args.rows) return;
  const Share share(mask.live_columns(args.first_row + row));
  const T* g_y = args.g_x + row * args.x_row_stride;
  const T* g_dy = args.g_dy + row * args.dy_row_stride;
  T* g_dx = args.g_y + row * args.n;

  Vec<T, kElems> r_y[kLoads], r_dy[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (share.chunk_is_live(i)) {
      share.load(r_y[i], g_y, i, 0.f);
      share.load(r_dy[i], g_dy, i, 0.f);
    }
  }

  float dot = 0.f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (share.chunk_is_live(i)) {
      float y[kElems], dy[kElems];
      share.unpack(y, r_y[i], i, 0.f);
      share.unpack(dy, r_dy[i], i, 0.f);
#pragma unroll
      for (int j = 0; j < kElems; ++j) dot += y[j] * dy[j];
    }
  }
  dot = warp_sum(dot);
  if constexpr (Config::kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<Config::kThreads> s_exchange;
    dot = s_exchange.sum_warps(dot);
  }
  __shared__ ClusterExchange<Config::kCluster> s_cluster;
  dot = s_cluster.sum_blocks(dot);

#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    Vec<T, kElems> out = {};
    if (share.chunk_is_live(i)) {
      float y[kElems], dy[kElems];
      share.unpack(y, r_y[i], i, 0.f);
      share.unpack(dy, r_dy[i], i, 0.f);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float dx = y[j] * (dy[j] - dot);
        out.values[j] = from_float<T>(Mask::kMasked ? dx * mask.scale() : dx);
      }
      if (Mask::kMasked && !isfinite(dot)) clear_hidden(out, share.live, share.column(i));
    }
    if (share.column(i) < args.n) store_vec(g_dx + share.column(i), out);
  }
  s_cluster.finish();
}

// One block a row; kElems is a 16-byte access or one element.
template <typename T, int kElems, typename Mask>
__global__ __launch_bounds__(kSoftmaxStreamThreads) void softmax_stream_kernel(
    const RowArgs<T> args, const Mask mask) {
  constexpr int kStep = kSoftmaxStreamThreads * kElems;
  __shared__ BlockExchange<kSoftmaxStreamThreads> s_exchange;

  const Exponent<T> exponent(mask.scale());
  const int64_t row = blockIdx.x;
  const LiveRange live = mask.live(args.first_row + row);
  const T* g_x = args.g_x + row * args.x_row_stride;
  T* g_y = args.g_y + row * args.n;
  const int64_t start = live.begin / kElems * kElems + threadIdx.x * kElems;

  // First read: a running (max, sum) per thread.
  MaxSum part = {-INFINITY, 0.f};
  for (int64_t first = start; first < live.end; first += kStep) {
    float r_x[kElems];
    unpack<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent.sign, -INFINITY);
    float max = part.max;
#pragma unroll
    for (int j = 0; j < kElems; ++j) max = fmaxf(max, r_x[j]);
    part = {max, rescaled_sum(part, max, exponent.c)};
#pragma unroll
    for (int j = 0; j < kElems; ++j) part.sum += exponent(r_x[j], finite_max(max));
  }
  const MaxSum total = s_exchange.merge_warps(warp_merge(part, exponent.c), exponent.c);
  const float factor = 1.f / total.sum;

  // Second read, and the store.
  for (int64_t first = threadIdx.x * kElems; first < args.n; first += kStep) {
    Vec<T, kElems> out = {};
    if (touches<Mask>(live, first, kElems)) {
      float r_x[kElems];
      unpack<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent.sign, -INFINITY);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        out.values[j] = from_float<T>(exponent(r_x[j], total.max) * factor);
      }
      if constexpr (Mask::kMasked) {
        if (!isfinite(factor) || !isfinite(total.max)) clear_hidden(out, live, first);
      }
    }
    store_vec(g_y + first, out);
  }
}

template <typename T, int kElems, typename Mask>
__global__ __launch_bounds__(kSoftmaxStreamThreads) void softmax_backward_stream_kernel(
    const RowArgs<T> args, const Mask mask) {
  constexpr int kStep = kSoftmaxStreamThreads * kElems;
  __shared__ BlockExchange<kSoftmaxStreamThreads> s_exchange;

  const int64_t row = blockIdx.x;
  const LiveRange live = mask.live(args.first_row + row);
  const T* g_y = args.g_x + row * args.x_row_stride;
  const T* g_dy = args.g_dy + row * args.dy_row_stride;
  T* g_dx = args.g_y + row * args.n;

  float dot = 0.f;
  const int64_t start = live.begin / kElems * kElems + threadIdx.x * kElems;
  for (int64_t first = start; first < live.end; first += kStep) {
    float y[kElems], dy[kElems];
    unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, 1.f, 0.f);
    unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
    for (int j = 0; j < kElems; ++j) dot += y[j] * dy[j];
  }
  dot = s_exchange.sum_warps(warp_sum(dot));

  for (int64_t first = threadIdx.x * kElems; first < args.n; first += kStep) {
    Vec<T, kElems> out = {};
    if (touches<Mask>(live, first, kElems)) {
      float y[kElems], dy[kElems];
      unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, mask.scale(), 0.f);
      unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
      for (int j = 0; j < kElems; ++j) out.values[j] = from_float<T>(y[j] * (dy[j] - dot));
      if constexpr (Mask::kMasked) {
        if (!isfinite(dot)) clear_hidden(out, live, first);
      }
    }
    store_vec(g_dx + first, out);
  }
}

template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(__half{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
  }
}

// Calls body with the tile as a compile-time constant.
template <int kElemSize, bool kBackward, int kTile = 0, typename Body>
void dispatch_tile(int tile, const Body& body) {
  if constexpr (kTile < kNumSoftmaxTiles) {
    if constexpr (kSoftmaxTiles[kTile].suits(kElemSize, kBackward)) {
      if (tile == kTile) return body(std::integral_constant<int, kTile>{});
    }
    dispatch_tile<kElemSize, kBackward, kTile + 1>(tile, body);
  }
}

// Calls launch(args, blocks) with as many rows at a time as one grid can hold.
template <typename T, typename Launch>
void for_each_grid(RowArgs<T> args, int rows_per_block, int blocks_per_row, const Launch& launch) {
  const int64_t rows = args.rows;
  const int64_t most = kMaxGrid / blocks_per_row * rows_per_block;
  for (; args.first_row < rows; args.first_row += most) {
    args.rows = rows - args.first_row < most ? rows - args.first_row : most;
    const int64_t groups = (args.rows + rows_per_block - 1) / rows_per_block;
    launch(args, static_cast<unsigned>(groups * blocks_per_row));
    args.g_x += most * args.x_row_stride;
    if (args.g_dy) args.g_dy += most * args.dy_row_stride;
    args.g_y += most * args.n;
  }
}

// Launches one block a row, or one cluster.
template <typename Config, typename Kernel, typename Mask>
void launch_rows(Kernel kernel, const RowArgs<typename Config::T>& args, const Mask& mask,
                 cudaStream_t stream) {
  for_each_grid(args, Config::kRowsPerBlock, Config::kCluster,
                [&](const RowArgs<typename Config::T>& part, unsigned blocks) {
                  cudaLaunchAttribute cluster = {};
                  cluster.id = cudaLaunchAttributeClusterDimension;
                  cluster.val.clusterDim = {Config::kCluster, 1, 1};
                  cudaLaunchConfig_t config = {};
                  config.gridDim = dim3(blocks);
                  config.blockDim = dim3(Config::kThreads);
                  config.stream = stream;
                  config.attrs = &cluster;
                  config.numAttrs = Config::kCluster > 1 ? 1 : 0;
                  // A failure stays behind for check_launch.
                  (void)cudaLaunchKernelEx(&config, kernel, part, mask);
                });
}

template <typename T>
bool rows_aligned(const T* base, int64_t row_stride) {
  return reinterpret_cast<uintptr_t>(base) % kVectorBytes == 0 &&
         row_stride * static_cast<int64_t>(sizeof(T)) % kVectorBytes == 0;
}

template <typename T, typename Mask>
void launch_softmax_rows(const RowArgs<T>& args, const Mask& mask, cudaStream_t stream) {
  const bool aligned = rows_aligned(args.g_x, args.x_row_stride) && rows_aligned(args.g_y, args.n);
  const int tile = choose_softmax_tile({args.n, sizeof(T), aligned, /*backward=*/false,
                                        mask.tiled(args.rows), device_has_clusters()});
  dispatch_tile<sizeof(T), /*kBackward=*/false>(tile, [&](auto index) {
    using Config = RowConfig<T, index.value>;
    launch_rows<Config>(softmax_kernel<Config, Mask>, args, mask, stream);
  });
  if (tile >= 0) return;
  constexpr int kElems = kVectorBytes / sizeof(T);
  const auto kernel = aligned && args.n % kElems == 0 ? softmax_stream_kernel<T, kElems, Mask>
                                                      : softmax_stream_kernel<T, 1, Mask>;
  for_each_grid(args, 1, 1, [&](const RowArgs<T>& part, unsigned blocks) {
    kernel<<<blocks, kSoftmaxStreamThreads, 0, stream>>>(part, mask);
  });
}

template <typename T, typename Mask>
void launch_softmax_backward_rows(const RowArgs<T>& args, const Mask& mask, cudaStream_t stream) {
  const bool aligned = rows_aligned(args.g_x, args.x_row_stride) &&
                       rows_aligned(args.g_dy, args.dy_row_stride) &&
                       rows_aligned(args.g_y, args.n);
  const int tile = choose_softmax_tile({args.n, sizeof(T), aligned, /*backward=*/true,
                                        mask.tiled(args.rows), device_has_clusters()});
  dispatch_tile<sizeof(T), /*kBackward=*/true>(tile, [&](auto index) {
    using Config = RowConfig<T, index.value>;
    launch_rows<Config>(softmax_backward_kernel<Config, Mask>, args, mask, stream);
  });
  if (tile >= 0) return;
  constexpr int kElems = kVectorBytes / sizeof(T);
  const auto kernel = aligned && args.n % kElems == 0
                          ? softmax_backward_stream_kernel<T, kElems, Mask>
                          : softmax_backward_stream_kernel<T, 1, Mask>;
  for_each_grid(args, 1, 1, [&](const RowArgs<T>& part, unsigned blocks) {
    kernel<<<blocks, kSoftmaxStreamThreads, 0, stream>>>(part, mask);
  });
}

}  // namespace torchweld
