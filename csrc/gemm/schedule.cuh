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
};

}  // namespace torchweld
