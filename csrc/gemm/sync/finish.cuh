// Finishes a work tile. Each warp writes its accumulators to shared memory and reads them back as
// groups of 8 contiguous columns. The warp then runs the epilogue on these groups. If K is split,
// the warp stores the groups in the workspace instead.
#pragma once

#include "gemm/element.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/schedule.cuh"

namespace torchweld {

// Returns the swizzled index of chunk c in a row of a warp's staging memory. A chunk is 4 floats.
// NOTE: with this swizzle there are no bank conflicts, neither in the 8-byte writes of fragments
// nor in the 16-byte reads of every second chunk.
template <int kColumns>
__device__ __forceinline__ int staged_chunk(int row, int c) {
  return c ^ (row & 3) << 1 ^ (row * (kColumns / 4) + c) / 8 % 2;
}

// Stores groups of 8 sums in the split-K workspace. v holds the groups in the order that
// GroupWriter::write describes.
template <int kGroups>
__device__ __forceinline__ void store_split(const GemmParams& p, const WorkTile& work, int64_t row,
                                            int row_step, int rows, int64_t column,
                                            const float (&v)[kGroups][kGroup]) {
  const bool gated = p.epilogue.gated;
  const int64_t width = gemm_sum_width(p.n, gated);
  float* g_sums = p.workspace + ((work.split * p.batch + work.batch) * p.m + row) * width + column;
#pragma unroll
  for (int set = 0; set < kGroups; ++set) {
    const bool right = gated && set >= kGroups / 2;
    const int at = right ? set - kGroups / 2 : set;
    if (at < rows) store_sums(g_sums + at * row_step * width + (right ? width / 2 : 0), v[set]);
  }
}

// Writes the accumulators of a warp to y, through the epilogue. If K is split, writes them to the
// split-K workspace instead. The accumulators pass through shared memory, 16 rows at a time.
template <GemmMath kMath, int kTile, int kM, int kN, class Work>
__device__ __forceinline__ void finish(float (&acc)[kM][kN][4], const GemmParams& p,
                                       const Work& work, float* s_staging) {
  using T = ElementOf<kMath>;
  constexpr SyncTile kT = kSyncTiles[kTile];
  constexpr int kColumns = kT.warp_n();
  // The number of groups of 8 sums that a thread handles at once.
  constexpr int kGroups = 16 * kColumns / 32 / kGroup;
  const int thread = fresh_thread();
  const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp % kT.warps_m, warp_n = warp / kT.warps_m;
  float* s_sums = s_staging + warp * 16 * kColumns;
  const bool gated = p.epilogue.gated, split = p.choice.splits > 1;
  // A thread handles 8 columns of every row_step-th row. In a gated product it handles 8 left
  // columns and the 8 right columns that belong to them.
  constexpr int kLanes = kColumns / 8;
  const int row_in = gated ? lane / (kLanes / 2) : lane / kLanes;
  const int column_in = gated ? lane % (kLanes / 2) * kGroup : lane % kLanes * kGroup;
  const int row_step = (gated ? 64 : 32) / kLanes;
  const int first = gated ? column_in * 2 : column_in;
  const int64_t first_row = work.first_row_of(1, 0, kT.block_m) + warp_m * kT.warp_m() + row_in;
  const int64_t column =
      (work.tile_n * kT.block_n + warp_n * kColumns) / (gated ? 2 : 1) + column_in;
  const bool there = column < p.n;
  int rows_left = there ? int(min(int64_t{kT.warp_m()}, work.rows_end(p) - first_row)) : 0;
  const GroupWriter<T, Work::kGrouped> writer(p, work.batch, there ? column : 0);

#pragma unroll 1
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int chunk = staged_chunk<kColumns>(g, j * 2 + t / 2);
      float* s_to = s_sums + g * kColumns + chunk * 4 + t % 2 * 2;
      *reinterpret_cast<float2*>(s_to) = make_float2(acc[0][j][0], acc[0][j][1]);
      *reinterpret_cast<float2*>(s_to + 8 * kColumns) = make_float2(acc[0][j][2], acc[0][j][3]);
    }
    __syncwarp();
    float v[kGroups][kGroup];
#pragma unroll
    for (int set = 0; set < kGroups; ++set) {
      const bool right = gated && set >= kGroups / 2;
      const int row = row_in + (right ? set - kGroups / 2 : set) * row_step;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = staged_chunk<kColumns>(row, first / 4 + (right ? 2 : 0) + half);
        const auto four = load_vec<float, 4>(s_sums + row * kColumns + chunk * 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[set][half * 4 + k] = four.values[k];
      }
    }
    __syncwarp();
    const int64_t row = first_row + i * 16;
    const int rows_up = rows_left + row_step - 1;
    const int rows = gated ? rows_up / (64 / kLanes) : rows_up / (32 / kLanes);
    if (split) {
      store_split(p, work, row, row_step, rows, column, v);
    } else {
      writer.write(row, row_step, rows, v);
    }
    rows_left -= 16;
    // NOTE: the loop over i is not unrolled, because its code is long. Registers can't be indexed
    // at run time, so every iteration uses acc[0]. Therefore the accumulators of the later
    // iterations move down by one index here.
#pragma unroll
    for (int next = 1; next < kM; ++next) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[next - 1][j][r] = acc[next][j][r];
      }
    }
  }
}

}  // namespace torchweld
