// From a problem to the kernel that takes it, for every mask of the row softmax.
#pragma once

#include <type_traits>

#include "core/choices.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "ops/softmax/softmax_rows.cuh"
#include "ops/softmax/softmax_stream.cuh"
#include "ops/softmax/softmax_tuning.h"

namespace torchweld {

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
  note_kernel(kernel, Config::kThreads, 0);
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

// An index into kSoftmaxTiles, or -1 for the streaming kernel.
template <typename T, typename Mask>
int pick_softmax_tile(const RowArgs<T>& args, const Mask& mask, bool aligned, bool backward) {
  return pick<SoftmaxTuning>(
      {{args.n, sizeof(T), aligned, backward, mask.tiled(args.rows), device_has_clusters()},
       args.rows,
       Mask::kMasked,
       std::is_same_v<T, __nv_bfloat16>});
}

template <typename T, typename Mask>
void launch_softmax_rows(const RowArgs<T>& args, const Mask& mask, cudaStream_t stream) {
  const bool aligned = rows_aligned(args.g_x, args.x_row_stride * sizeof(T)) &&
                       rows_aligned(args.g_y, args.n * sizeof(T));
  const int tile = pick_softmax_tile(args, mask, aligned, /*backward=*/false);
  dispatch_tile<sizeof(T), /*kBackward=*/false>(tile, [&](auto index) {
    using Config = RowConfig<T, index.value>;
    launch_rows<Config>(softmax_kernel<Config, Mask>, args, mask, stream);
  });
  if (tile >= 0) return;
  constexpr int kElems = kVectorBytes / sizeof(T);
  const auto kernel = aligned && args.n % kElems == 0 ? softmax_stream_kernel<T, kElems, Mask>
                                                      : softmax_stream_kernel<T, 1, Mask>;
  note_kernel(kernel, kSoftmaxStreamThreads, 0);
  for_each_grid(args, 1, 1, [&](const RowArgs<T>& part, unsigned blocks) {
    kernel<<<blocks, kSoftmaxStreamThreads, 0, stream>>>(part, mask);
  });
}

template <typename T, typename Mask>
void launch_softmax_backward_rows(const RowArgs<T>& args, const Mask& mask, cudaStream_t stream) {
  const bool aligned = rows_aligned(args.g_x, args.x_row_stride * sizeof(T)) &&
                       rows_aligned(args.g_dy, args.dy_row_stride * sizeof(T)) &&
                       rows_aligned(args.g_y, args.n * sizeof(T));
  const int tile = pick_softmax_tile(args, mask, aligned, /*backward=*/true);
  dispatch_tile<sizeof(T), /*kBackward=*/true>(tile, [&](auto index) {
    using Config = RowConfig<T, index.value>;
    launch_rows<Config>(softmax_backward_kernel<Config, Mask>, args, mask, stream);
  });
  if (tile >= 0) return;
  constexpr int kElems = kVectorBytes / sizeof(T);
  const auto kernel = aligned && args.n % kElems == 0
                          ? softmax_backward_stream_kernel<T, kElems, Mask>
                          : softmax_backward_stream_kernel<T, 1, Mask>;
  note_kernel(kernel, kSoftmaxStreamThreads, 0);
  for_each_grid(args, 1, 1, [&](const RowArgs<T>& part, unsigned blocks) {
    kernel<<<blocks, kSoftmaxStreamThreads, 0, stream>>>(part, mask);
  });
}

}  // namespace torchweld
