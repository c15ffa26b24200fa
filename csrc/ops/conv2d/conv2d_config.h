// Which kernel and tile a single-channel convolution takes. Pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// kDirect: fp32, the square kernels of kDirectTiles, in registers. kBanded: 16 bits, on tensor
// cores. kGeneral: everything else.
enum class Conv2dKernel : int8_t { kDirect, kBanded, kGeneral };

// A thread of the direct kernel has kDirectColumns adjacent columns of `rows` rows.
struct DirectTile {
  int size;  // of the kernel, both ways
  int rows;
  int blocks_per_sm;  // at least; bounds the registers
};
inline constexpr int kDirectThreads = 256;
inline constexpr int kDirectColumns = 4;
inline constexpr DirectTile kDirectTiles[] = {{3, 8, 4}, {4, 8, 3}, {5, 8, 3}, {7, 8, 2}};
inline constexpr int kNumDirectTiles = sizeof(kDirectTiles) / sizeof(kDirectTiles[0]);

// A warp of the banded kernel has tiles_m tiles of 16 rows by tiles_n of 8 columns.
struct BandedTile {
  int tiles_m;
  int tiles_n;

  constexpr int rows(int warps) const { return warps * tiles_m * 16; }
  constexpr int columns() const { return 8 * tiles_n; }
};
inline constexpr int kBandedWarps = 4;
inline constexpr BandedTile kBandedTiles[] = {{8, 1}, {4, 2}, {4, 4}, {2, 8}};
inline constexpr int kNumBandedTiles = sizeof(kBandedTiles) / sizeof(kBandedTiles[0]);
inline constexpr int kBandedMaxKernel = 31;

// A block of the general kernel has kGeneralThreads * kGeneralRows outputs and takes the kernel in
// pieces of kTapChunk both ways.
inline constexpr int kGeneralThreads = 256;
inline constexpr int kGeneralRows = 8;  // of a thread
inline constexpr int kTapChunk = 32;

constexpr Conv2dKernel choose_conv2d(int64_t kernel_height, int64_t kernel_width, int elem_size) {
  if (elem_size == 2) {
    const bool banded = kernel_height <= kBandedMaxKernel && kernel_width <= kBandedMaxKernel;
    return banded ? Conv2dKernel::kBanded : Conv2dKernel::kGeneral;
  }
  for (const DirectTile& tile : kDirectTiles) {
    if (kernel_height == tile.size && kernel_width == tile.size) return Conv2dKernel::kDirect;
  }
  return Conv2dKernel::kGeneral;
}

// The narrowest tile that holds a row of the image, else the widest.
constexpr int choose_banded_tile(int64_t width) {
  for (int i = 0; i < kNumBandedTiles - 1; ++i) {
    if (width <= kBandedTiles[i].columns()) return i;
  }
  return kNumBandedTiles - 1;
}

// How the gradient to the weight is split: `chunks` squares of taps x taps weights, `blocks` blocks
// each, of which every one leaves taps * taps sums.
struct Conv2dWeightSplit {
  int taps;
  int64_t chunks_across;
  int64_t chunks;
  int64_t blocks;

  constexpr int64_t partials() const { return chunks * blocks * taps * taps; }
};
inline constexpr int kWeightThreads = 256;
inline constexpr int kWeightRows = 16;  // of the image, that a thread walks down at a time
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
  const int64_t most = (items + kWeightThreads - 1) / kWeightThreads;
  const int64_t wanted = kWeightBlocks / best.chunks;
  best.blocks = wanted < kMinWeightBlocks ? kMinWeightBlocks : wanted;
  best.blocks = best.blocks < most ? best.blocks : most;
  return best;
}

}  // namespace torchweld
