// Defines the order of the work items of a matmul. A work item is one tile of the result y in one
// batch, for one split of K.
#pragma once

#include "core/fast_divide.h"
#include "device/thread.cuh"
#include "gemm/gemm.h"

namespace torchweld {

// The number of rows of y in a band. A band consists of all tiles of y in these rows. The schedule
// finishes all tiles of a band before it begins the next band.
inline constexpr int kBandRows = 2048;

// Orders the work items as four nested loops do. The outermost loop is over the batches. The next
// loops are over the splits of a batch and over the bands of a split. The innermost loop is over
// the tiles of a band.
struct GemmSchedule {
  uint32_t tiles_m, tiles_n, items, band_tiles;
  FastDivisor tiles, splits, band_items, band_height, last_height;

  GemmSchedule(int64_t tiles_m, int64_t tiles_n, int64_t splits, int64_t batch, int64_t band_tiles)
      : tiles_m(uint32_t(tiles_m)),
        tiles_n(uint32_t(tiles_n)),
        items(uint32_t(tiles_m * tiles_n * splits * batch)),
        band_tiles(uint32_t(band_tiles)),
        tiles(tiles_m * tiles_n),
        splits(splits),
        band_items(band_tiles * tiles_n),
        band_height(band_tiles),
        last_height((tiles_m - 1) % band_tiles + 1) {}
};

// The tile, the batch and the split of one work item.
struct WorkTile {
  int64_t tile_m, tile_n, batch;
  int split;

  __device__ __forceinline__ WorkTile(const GemmSchedule& grid, uint32_t item) {
    const uint32_t outer = grid.tiles.divide(item);
    const uint32_t tile = item - outer * grid.tiles_m * grid.tiles_n;
    const uint32_t splits_before = grid.splits.divide(outer);
    batch = splits_before;
    split = int(outer - splits_before * grid.splits.divisor());
    const uint32_t band = grid.band_items.divide(tile);
    const uint32_t in_band = tile - band * grid.band_items.divisor();
    const bool last = (band + 1) * grid.band_tiles >= grid.tiles_m;
    const FastDivisor& height = last ? grid.last_height : grid.band_height;
    const uint32_t n = height.divide(in_band);
    tile_m = band * grid.band_tiles + in_band - n * height.divisor();
    tile_n = n;
  }
  __device__ __forceinline__ WorkTile(const GemmParams&, const GemmSchedule& grid, uint32_t item)
      : WorkTile(grid, item) {}

  static constexpr bool kGrouped = false;
  __device__ __forceinline__ bool exists() const { return true; }
  // Whether the CTAs of a cluster have the same rows and different columns. Otherwise they have
  // different rows and the same columns.
  static constexpr bool kClusterOfColumns = false;
  // Return the first row and the first column of a CTA's part of the tile. A cluster of `ctas` CTAs
  // computes the tile, and each CTA computes `rows` rows or `columns` columns.
  __device__ __forceinline__ int64_t first_row_of(int ctas, int rank, int rows) const {
    return (tile_m * ctas + rank) * rows;
  }
  __device__ __forceinline__ int64_t first_column_of(int, int, int columns) const {
    return tile_n * columns;
  }
  __device__ __forceinline__ int64_t rows_end(const GemmParams& p) const { return p.m; }
  // The columns along K that the work item multiplies.
  __device__ __forceinline__ int64_t k_begin(const GemmParams& p) const {
    return split * p.choice.k_split;
  }
  __device__ __forceinline__ int64_t k_end(const GemmParams& p) const {
    return min(p.k, (split + 1) * p.choice.k_split);
  }
};

// A work item of a product with groups of rows. `batch` is the group. If kSwapAb is true, the rows
// are those of wgmma's operand B (a swap_ab tile).
template <bool kSwapAb = false>
struct GroupedRowsWork : WorkTile {
  int first_row, end_row;

  static constexpr bool kGrouped = true, kClusterOfColumns = !kSwapAb;
  __device__ __forceinline__ GroupedRowsWork(const GemmParams& p, const GemmSchedule& grid,
                                             uint32_t item)
      : WorkTile(grid, item) {
    const int4 tile = *reinterpret_cast<const int4*>(p.groups.tiles + (kSwapAb ? tile_n : tile_m));
    batch = tile.x;
    first_row = tile.y;
    end_row = tile.z;
  }
  __device__ __forceinline__ bool exists() const { return batch >= 0; }
  __device__ __forceinline__ int64_t first_row_of(int ctas, int rank, int rows) const {
    return kSwapAb ? WorkTile::first_row_of(ctas, rank, rows) : first_row;
  }
  __device__ __forceinline__ int64_t first_column_of(int ctas, int rank, int columns) const {
    return kSwapAb ? first_row : (tile_n * ctas + rank) * columns;
  }
  __device__ __forceinline__ int64_t rows_end(const GemmParams&) const { return end_row; }
};

// A work item of a product with groups of K. `batch` is the group.
struct GroupedKWork : WorkTile {
  int first_k, end_k;

  __device__ __forceinline__ GroupedKWork(const GemmParams& p, const GemmSchedule& grid,
                                          uint32_t item)
      : WorkTile(grid, item),
        first_k(batch == 0 ? 0 : p.groups.ends[batch - 1]),
        end_k(p.groups.ends[batch]) {}
  __device__ __forceinline__ int64_t k_begin(const GemmParams&) const { return first_k; }
  __device__ __forceinline__ int64_t k_end(const GemmParams&) const { return end_k; }
};

}  // namespace torchweld
