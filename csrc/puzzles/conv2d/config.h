// Chooses the kernel and the tile of a single-channel convolution. This is pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// The engines. "Kernel" means the convolution kernel here.
//   kDirect   fp32, square kernels of a size in kDirectTiles, in registers
//   kCells    16 bits, kernels up to 9 x 9, on tensor cores, without shared memory
//   kGeneral  any dtype, any kernel
enum class Conv2dEngine : int8_t { kDirect, kCells, kGeneral };

// A tile of the direct kernel. A thread computes kDirectColumns contiguous columns of a strip. The
// strip has up to strip_rows rows and is computed from top to bottom. The loads of `ahead` rows are
// in flight. The registers hold `buffers` rows of x and `buffers` rows of sums. If `ahead` equals
// `buffers`, the registers of a row of x are reloaded directly after this row is added to the sums.
struct DirectTile {
  int size;     // kernel height and width
  int buffers;  // the number of buffers; at least `size`
  int ahead;
  int strip_rows;
  int blocks_per_sm;        // minimum number of blocks per SM; it limits the registers
  int small_blocks_per_sm;  // the same for the kernel for small images
};
inline constexpr int kDirectThreads = 128;
inline constexpr int kDirectColumns = 4;
// NOTE: the tile for convolution kernels of size 4 has 5 buffers, so that a fifth row is in flight.
// On an H200, the direct kernel then needs 1.06 to 1.08 times the time of a copy. With 4 buffers,
// it needed 1.09 to 1.10 times the time of a copy.
inline constexpr DirectTile kDirectTiles[] = {
    {3, 3, 3, 16, 8, 6}, {4, 5, 5, 16, 4, 5}, {5, 5, 5, 16, 4, 5}, {7, 7, 2, 64, 4, 4}};
inline constexpr int kNumDirectTiles = sizeof(kDirectTiles) / sizeof(kDirectTiles[0]);

// Returns the index of the tile for square convolution kernels of size `size`, or -1 if there is no
// such tile.
constexpr int direct_tile(int64_t size) {
  for (int i = 0; i < kNumDirectTiles; ++i) {
    if (kDirectTiles[i].size == size) return i;
  }
  return -1;
}

// The direct engine has a second kernel for contiguous images of kSmallColumns columns and up to
// kSmallHeight rows. A thread computes an image, kSmallRows rows at a time.
inline constexpr int kSmallWarps = 4;
inline constexpr int kSmallThreads = 32 * kSmallWarps;
inline constexpr int kSmallColumns = 8;
inline constexpr int kSmallRows = 8;
inline constexpr int kSmallHeight = 16;

// Returns the number of strips that divide the height of an image. `across` is the number of strips
// side by side, in all images of the batch together. A strip has up to max_rows rows. While the
// batch has fewer than min_units strips, the function halves max_rows, but not below min_rows.
constexpr int64_t count_strips(int64_t height, int64_t max_rows, int64_t min_rows, int64_t across,
                               int64_t min_units) {
  const auto strips = [&] { return (height - 1) / max_rows + 1; };
  while (max_rows > min_rows && across * strips() < min_units) max_rows /= 2;
  return strips();
}

// direct_strip_rows returns the number of rows in a strip. All strips of an image except the last
// one have this number of rows. Small calls have smaller strips, to keep a large GPU busy.
inline constexpr int64_t kDirectMinThreads = 65536;
inline constexpr int kDirectMinRows = 8;
constexpr int64_t direct_strip_rows(const DirectTile& tile, int64_t batch, int64_t height,
                                    int64_t width) {
  const int64_t across = batch * ((width - 1) / kDirectColumns + 1);
  const int64_t strips =
      count_strips(height, tile.strip_rows, kDirectMinRows, across, kDirectMinThreads);
  return (height - 1) / strips + 1;
}

// A tile of the cells kernel. Four lanes compute a strip of up to strip_rows rows, from top to
// bottom. A cell has 4 rows, and the loads of `ahead` cells are in flight. The convolution kernel
// may have up to `size` rows and `size` columns.
struct CellsTile {
  int size;
  int ahead;
  int strip_rows;
  int blocks_per_sm;  // minimum number of blocks per SM; it limits the registers
};
inline constexpr int kCellsWarps = 4;
inline constexpr int kCellsThreads = 32 * kCellsWarps;
inline constexpr int kCellRows = 4;
inline constexpr int kCellColumns = 8;
inline constexpr CellsTile kCellsTiles[] = {
    {3, 2, 32, 8}, {5, 2, 32, 8}, {7, 2, 64, 6}, {9, 2, 64, 5}};
inline constexpr int kNumCellsTiles = sizeof(kCellsTiles) / sizeof(kCellsTiles[0]);

// cells_strip_rows returns the number of rows in a strip, a multiple of the number of rows of a
// cell. All strips of an image except the last one have this number of rows. Small calls have
// smaller strips, to keep the schedulers of a large GPU busy.
inline constexpr int64_t kCellsMinStrips = 4096;
inline constexpr int kCellsMinRows = 8;
constexpr int64_t cells_strip_rows(const CellsTile& tile, int64_t batch, int64_t height,
                                   int64_t width) {
  const int64_t cells = (height - 1) / kCellRows + 1;
  const int64_t across = batch * ((width - 1) / kCellColumns + 1);
  const int64_t strips =
      count_strips(height, tile.strip_rows, kCellsMinRows, across, kCellsMinStrips);
  return ((cells - 1) / strips + 1) * kCellRows;
}

// The cells engine has a second kernel, for contiguous images that are one cell wide and at most
// two cells high. It supports the first kNumNarrowTiles tiles.
// NOTE: the measurements for x (65536, 8, 8) on an H200 are multiples of the time of a copy of x.
// The narrow kernel needs 0.96 to 1.00 for convolution kernels of size 3 to 5, and 1.04 for size 7.
// The cells kernel needed 1.13 to 1.25.
inline constexpr int kNarrowHeight = 2 * kCellRows;
inline constexpr int kNumNarrowTiles = 3;

// A block of the general kernel computes kGeneralThreads * kGeneralRows outputs. Taps are the
// elements of the convolution kernel. The block loops over chunks of kTapChunk x kTapChunk taps.
inline constexpr int kGeneralThreads = 256;
inline constexpr int kGeneralRows = 8;  // the number of outputs per thread
inline constexpr int kTapChunk = 32;

// The fits_* functions return whether an engine supports a problem.
constexpr bool fits_direct(int64_t kernel_height, int64_t kernel_width, int elem_size) {
  return elem_size == 4 && kernel_height == kernel_width && direct_tile(kernel_height) >= 0;
}
constexpr bool fits_cells(const CellsTile& tile, int64_t kernel_height, int64_t kernel_width,
                          int elem_size) {
  return elem_size == 2 && kernel_height <= tile.size && kernel_width <= tile.size;
}

constexpr Conv2dEngine choose_conv2d(int64_t kernel_height, int64_t kernel_width, int elem_size) {
  if (fits_direct(kernel_height, kernel_width, elem_size)) return Conv2dEngine::kDirect;
  const CellsTile& largest = kCellsTiles[kNumCellsTiles - 1];
  if (fits_cells(largest, kernel_height, kernel_width, elem_size)) return Conv2dEngine::kCells;
  return Conv2dEngine::kGeneral;
}

// Returns the index of the smallest tile that supports the convolution kernel.
constexpr int choose_cells_tile(int64_t kernel_height, int64_t kernel_width) {
  int i = 0;
  while (i < kNumCellsTiles - 1 && !fits_cells(kCellsTiles[i], kernel_height, kernel_width, 2)) {
    ++i;
  }
  return i;
}

// How blocks share the computation of dweight. The weights are divided into `chunks` squares of
// taps x taps weights. Each square is computed by `blocks` blocks, and each of these blocks writes
// taps * taps partials.
struct Conv2dWeightSplit {
  int taps;
  int64_t chunks_across;
  int64_t chunks;
  int64_t blocks;

  constexpr int64_t partials() const { return chunks * blocks * taps * taps; }
};
inline constexpr int kWeightThreads = 256;
// The number of outputs that a thread loops over. They lie in one column of an image.
inline constexpr int kWeightRows = 16;
inline constexpr int64_t kWeightBlocks = 1056;
inline constexpr int64_t kMinWeightBlocks = 16;

constexpr Conv2dWeightSplit split_conv2d_dweight(int64_t batch, int64_t height, int64_t width,
                                                 int64_t kernel_height, int64_t kernel_width) {
  constexpr int kTaps[] = {7, 5, 4, 3};
  Conv2dWeightSplit best = {0, 0, 0, 0};
  for (const int taps : kTaps) {
    const int64_t across = (kernel_width + taps - 1) / taps;
    const int64_t chunks = across * ((kernel_height + taps - 1) / taps);
    if (best.taps == 0 || chunks * taps * taps < best.chunks * best.taps * best.taps) {
      best = {taps, across, chunks, 0};
    }
  }
  const int64_t items = batch * ((height + kWeightRows - 1) / kWeightRows) * width;
  const int64_t max_blocks = (items + kWeightThreads - 1) / kWeightThreads;
  const int64_t wanted = kWeightBlocks / best.chunks;
  best.blocks = wanted < kMinWeightBlocks ? kMinWeightBlocks : wanted;
  best.blocks = best.blocks < max_blocks ? best.blocks : max_blocks;
  return best;
}

}  // namespace torchweld
