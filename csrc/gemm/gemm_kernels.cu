// The launcher of the matmul engines, and the kernel that sums split-K partials.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/scan.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/rows/launch.h"
#include "gemm/sm90/launch.h"
#include "gemm/sync/launch.h"

namespace torchweld {
namespace {

constexpr int kSumThreads = 256;

// Each thread handles 8 columns of one row of y. The thread adds up the split-K partials of these
// columns in a fixed order and applies the epilogue.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    split_sum_kernel(const __grid_constant__ GemmParams p, int64_t groups) {
  const int64_t index = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (index >= groups * p.m * p.batch) return;
  const int64_t column = index % groups * kGroup, row = index / groups % p.m;
  const int64_t batch = index / groups / p.m;
  const bool gated = p.epilogue.gated;
  const int64_t width = gemm_sum_width(p.n, gated);
  float sums[2][kGroup] = {};  // sums[1] is the right half of a gated product
  for (int split = 0; split < p.choice.splits; ++split) {
    const float* g_sums = p.workspace + ((split * p.batch + batch) * p.m + row) * width + column;
    add_sums(sums[0], g_sums);
    if (gated) add_sums(sums[1], g_sums + width / 2);
  }
  const GroupWriter<T> writer(p, batch, column);
  if (gated) {
    writer.write(row, 1, 1, sums);
  } else {
    writer.write(row, 1, 1, reinterpret_cast<float (&)[1][kGroup]>(sums));
  }
}

template <typename T>
void launch_split_sum(const GemmParams& p, cudaStream_t stream) {
  const int64_t groups = (p.n + kGroup - 1) / kGroup;
  const int64_t blocks = (groups * p.m * p.batch + kSumThreads - 1) / kSumThreads;
  launch_kernel(split_sum_kernel<T>, {blocks, kSumThreads}, stream, p, groups);
}

template <GemmMath kMath>
void launch_sync_math(const GemmParams& params, cudaStream_t stream) {
  switch (kSyncTiles[params.choice.tile].size()) {
    case SyncSize::kLarge:
      // kFloat32 has no large tile.
      if constexpr (kMath != GemmMath::kFloat32) {
        launch_sync_size<kMath, SyncSize::kLarge>(params, stream);
      }
      return;
    case SyncSize::kMedium:
      return launch_sync_size<kMath, SyncSize::kMedium>(params, stream);
    case SyncSize::kSmall:
      return launch_sync_size<kMath, SyncSize::kSmall>(params, stream);
  }
}

void launch_sync_gemm(const GemmParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch_sync_math<GemmMath::kFloat16>(p, stream);
    case DType::kBFloat16:
      return launch_sync_math<GemmMath::kBFloat16>(p, stream);
    case DType::kFloat32:
      return p.tf32 ? launch_sync_math<GemmMath::kTf32>(p, stream)
                    : launch_sync_math<GemmMath::kFloat32>(p, stream);
  }
}

void launch_rows_gemm(const GemmParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_rows_tiles<GemmMath::kFloat16>(p, stream);
  launch_rows_tiles<GemmMath::kBFloat16>(p, stream);
}

constexpr int kMapThreads = 1024;

// Writes the tiles of all groups of rows, one group after the other. The tiles behind the last one
// get group -1. Every block counts the tiles of all groups and writes kMapThreads tiles.
__global__ void __launch_bounds__(kMapThreads)
    group_tiles_kernel(const GemmGroups groups, int tile_rows, int tiles) {
  extern __shared__ int s_first[];  // the first tile of each group
  __shared__ int s_warps[kMapThreads / 32];
  griddep_launch_dependents();
  griddep_wait();
  const int all = block_scan(
      groups.count, s_warps,
      [&](int group) {
        const int rows = groups.ends[group] - (group == 0 ? 0 : groups.ends[group - 1]);
        return (rows + tile_rows - 1) / tile_rows;
      },
      [&](int group, int, int before) { s_first[group] = before; });
  __syncthreads();
  const int tile = int(blockIdx.x) * kMapThreads + int(threadIdx.x);
  if (tile >= tiles) return;
  int4 to = make_int4(-1, 0, 0, 0);
  if (tile < all) {
    const int group =
        last_at_or_before(groups.count, tile, [&](int group) { return s_first[group]; });
    const int start = group == 0 ? 0 : groups.ends[group - 1];
    to = make_int4(group, start + (tile - s_first[group]) * tile_rows, groups.ends[group], 0);
  }
  reinterpret_cast<int4*>(groups.tiles)[tile] = to;
}

}  // namespace

int64_t group_tile_rows(const GemmChoice& choice) {
  if (choice.engine == GemmEngine::kSync) return kSyncTiles[choice.tile].block_m;
  return sm90::kTiles[choice.tile].group_rows();
}

void launch_group_tiles(const GemmParams& p, int64_t tile_rows, cudaStream_t stream) {
  if (p.groups.has_tiles) return;
  const auto tiles = static_cast<int>(max_group_tiles(p.m, p.groups.count, tile_rows));
  Grid grid((tiles + kMapThreads - 1) / kMapThreads, kMapThreads,
            p.groups.count * static_cast<int>(sizeof(int)));
  grid.overlaps = true;
  launch_kernel(group_tiles_kernel, grid, stream, p.groups, static_cast<int>(tile_rows), tiles);
}

void launch_gemm_sum(const GemmParams& p, cudaStream_t stream) {
  dispatch_dtype(p.dtype, [&](auto element) { launch_split_sum<decltype(element)>(p, stream); });
}

int64_t gemm_written_bytes(const GemmParams& p) {
  return p.choice.engine == GemmEngine::kSm90 ? sm90::written_bytes(p) : 0;
}

void launch_gemm(const GemmParams& p, cudaStream_t stream) {
  if (p.groups.dim == Grouped::kRows) {
    launch_group_tiles(p, group_tile_rows(p.choice), stream);
  }
  switch (p.choice.engine) {
    case GemmEngine::kSync:
      launch_sync_gemm(p, stream);
      break;
    case GemmEngine::kSm90:
      sm90::launch_gemm_tile(p, stream);
      break;
    case GemmEngine::kRows:
      launch_rows_gemm(p, stream);
  }
  if (p.choice.splits > 1) launch_gemm_sum(p, stream);
  check_launch("matmul");
}

}  // namespace torchweld
