// Launches the kernels of row softmax and its backward, for every mask.
#pragma once

#include <type_traits>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "softmax/config.h"
#include "softmax/params.h"
#include "softmax/ring.cuh"
#include "softmax/ring_backward.cuh"
#include "softmax/rows.cuh"
#include "softmax/stream.cuh"

namespace torchweld {

template <typename T>
RowArgs<T> row_args(const SoftmaxParams& p) {
  return {
      static_cast<const T*>(p.x), nullptr, static_cast<T*>(p.y), p.rows, p.n, p.x_row_stride, 0, 0};
}

template <typename T>
RowArgs<T> row_args(const SoftmaxBackwardParams& p) {
  return {static_cast<const T*>(p.y),
          static_cast<const T*>(p.dy),
          static_cast<T*>(p.dx),
          p.rows,
          p.n,
          p.y_row_stride,
          p.dy_row_stride,
          0};
}

// Splits the rows into ranges, so that each range fits into one grid. Calls launch(args, blocks)
// for each range.
template <typename T, typename Launch>
void for_each_grid(RowArgs<T> args, int rows_per_block, const Launch& launch) {
  const int64_t rows = args.rows;
  const int64_t max_rows = kMaxGrid * rows_per_block;
  for (; args.first_row < rows; args.first_row += max_rows) {
    args.rows = rows - args.first_row < max_rows ? rows - args.first_row : max_rows;
    launch(args, (args.rows + rows_per_block - 1) / rows_per_block);
    args.g_x += max_rows * args.x_row_stride;
    if (args.g_dy) args.g_dy += max_rows * args.dy_row_stride;
    args.g_y += max_rows * args.n;
  }
}

// Launches the kernel of a tile, with one block per kRowsPerBlock rows.
template <typename Config, bool kBackward, typename Mask>
void launch_tile(const RowArgs<typename Config::T>& args, const Mask& mask, cudaStream_t stream) {
  const auto kernel = [] {
    if constexpr (kBackward) return softmax_backward_kernel<Config, Mask>;
    if constexpr (!kBackward) return softmax_kernel<Config, Mask>;
  }();
  const int threads = Config::kRowsPerBlock > 1
                          ? Config::kThreads
                          : Config::kShape.threads_for(args.n, sizeof(typename Config::T));
  for_each_grid(args, Config::kRowsPerBlock, [&](const auto& grid_args, int64_t blocks) {
    launch_kernel(kernel, {blocks, static_cast<unsigned>(threads)}, stream, grid_args, mask);
  });
}

template <typename Config, typename Mask>
void launch_ring(const RowArgs<typename Config::T>& args, const Mask& mask,
                 const ZeroCounter& counter, cudaStream_t stream) {
  const auto kernel = [] {
    if constexpr (Config::kBackward) return softmax_ring_backward_kernel<Config, Mask>;
    if constexpr (!Config::kBackward) return softmax_ring_kernel<Config, Mask>;
  }();
  launch_kernel(kernel, ring_grid<Config>(args.rows), stream, args, mask, counter());
}

template <typename T, bool kBackward, int kElems, typename Mask>
void launch_stream(const RowArgs<T>& args, const Mask& mask, cudaStream_t stream) {
  const auto kernel = [] {
    if constexpr (kBackward) return softmax_backward_stream_kernel<T, kElems, Mask>;
    if constexpr (!kBackward) return softmax_stream_kernel<T, kElems, Mask>;
  }();
  for_each_grid(args, 1, [&](const auto& grid_args, int64_t blocks) {
    launch_kernel(kernel, {blocks, kSoftmaxStreamThreads}, stream, grid_args, mask);
  });
}

// Whether every row of g_x has the same offset from a 16-byte boundary as the corresponding row of
// the result, args.g_y.
template <typename T>
bool rows_in_phase(const RowArgs<T>& args, const T* g_x, int64_t row_stride) {
  return rows_aligned(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(g_x) -
                                                    reinterpret_cast<uintptr_t>(args.g_y)),
                      (row_stride - args.n) * sizeof(T));
}

template <typename T, bool kBackward, typename Mask>
SoftmaxProblem softmax_problem(const RowArgs<T>& args, const Mask& mask) {
  SoftmaxProblem problem = {args.n, sizeof(T)};
  problem.backward = kBackward;
  problem.masked = Mask::kMasked;
  problem.tiled = mask.tiled(args.rows);
  problem.in_phase = rows_in_phase(args, args.g_x, args.x_row_stride) &&
                     (!kBackward || rows_in_phase(args, args.g_dy, args.dy_row_stride));
  problem.aligned = rows_aligned(args.g_y, args.n * sizeof(T));
  problem.rows = args.rows;
  problem.bfloat16 = std::is_same_v<T, __nv_bfloat16>;
  problem.capped = Mask::kCapped;
  problem.device = device_facts();
  return problem;
}

template <typename T, bool kBackward, typename Mask>
void launch_softmax_rows(const RowArgs<T>& args, const Mask& mask, const ZeroCounter& counter,
                         cudaStream_t stream) {
  const SoftmaxProblem problem = softmax_problem<T, kBackward>(args, mask);
  const SoftmaxChoice choice = pick_softmax(problem);
  const bool aligned = problem.aligned && problem.in_phase;
  if (choice.engine == SoftmaxEngine::kTile) {
    dispatch_index<kNumSoftmaxTiles>(choice.tile, [&](auto tile) {
      if constexpr (kSoftmaxTiles[tile.value].fits_registers(sizeof(T), kBackward, Mask::kMasked)) {
        if (aligned) {
          launch_tile<RowConfig<T, tile.value, false>, kBackward>(args, mask, stream);
        } else {
          launch_tile<RowConfig<T, tile.value, true>, kBackward>(args, mask, stream);
        }
      }
    });
  } else if (choice.engine == SoftmaxEngine::kRing) {
    dispatch_index<kNumSoftmaxRings>(choice.tile, [&](auto ring) {
      if constexpr (kSoftmaxRings[ring.value].supports(kBackward) && !Mask::kCapped) {
        launch_ring<RingConfig<T, ring.value, kBackward>>(args, mask, counter, stream);
      }
    });
  } else if (aligned) {
    launch_stream<T, kBackward, kVectorBytes / sizeof(T)>(args, mask, stream);
  } else {
    launch_stream<T, kBackward, 1>(args, mask, stream);
  }
}

}  // namespace torchweld
