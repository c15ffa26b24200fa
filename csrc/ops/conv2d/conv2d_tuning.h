// The configurations of a single-channel convolution, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/conv2d/conv2d_config.h"

namespace torchweld {

struct Conv2dProblem {
  int64_t batch, height, width;
  int64_t kernel_height, kernel_width;
  int elem_size;
  bool flipped, bfloat16;
};

// `tile` is one of the banded, the cells or the narrow kernel's, 0 for the others.
struct Conv2dChoice {
  Conv2dKernel kernel;
  int tile;
};

struct Conv2dTuning {
  static constexpr const char* kName = "conv2d";
  static constexpr Field kProblem[] = {{"batch", 1, kMostSize},
                                       {"height", 1, kMostSize},
                                       {"width", 1, kMostSize},
                                       {"kernel_height", 1, kMostSize},
                                       {"kernel_width", 1, kMostSize},
                                       {"elem_size", 2, 4},
                                       {"flipped", 0, 1},
                                       {"bfloat16", 0, 1}};
  static constexpr const char* kChoice[] = {"kernel", "tile"};

  using Problem = Conv2dProblem;
  using Choice = Conv2dChoice;

  static Numbers numbers(const Conv2dProblem& p) {
    return {p.batch,        p.height,    p.width,   p.kernel_height,
            p.kernel_width, p.elem_size, p.flipped, p.bfloat16};
  }
  static Conv2dProblem problem(const Numbers& x) {
    return {x[0], x[1], x[2], x[3], x[4], x[5] == 4 ? 4 : 2, x[6] != 0, x[7] != 0};
  }
  static Numbers key(Numbers x) {
    for (int i = 0; i < 3; ++i) x[i] = size_class(x[i]);
    return x;
  }

  static Conv2dChoice choose(const Conv2dProblem& p) {
    const Conv2dKernel kernel =
        choose_conv2d(p.height, p.width, p.kernel_height, p.kernel_width, p.elem_size);
    if (kernel == Conv2dKernel::kCells || kernel == Conv2dKernel::kNarrow) {
      return {kernel, choose_cells_tile(p.kernel_height, p.kernel_width)};
    }
    return {kernel, kernel == Conv2dKernel::kBanded ? choose_banded_tile(p.width) : 0};
  }
  static Numbers told(const Conv2dChoice& choice) {
    return {static_cast<int64_t>(choice.kernel), choice.tile};
  }

  static std::string refusal(const Conv2dProblem& p, const Numbers& choice) {
    const int64_t tile = choice[1], tiles = tiles_of(choice[0]);
    if (tiles == 0) return "there is no such kernel";
    if (tile < 0 || tile >= tiles) {
      return tiles == 1 ? "the kernel has one tile" : no_such_tile(tile, static_cast<int>(tiles));
    }
    switch (static_cast<Conv2dKernel>(choice[0])) {
      case Conv2dKernel::kDirect:
        if (fits_direct(p.kernel_height, p.kernel_width, p.elem_size)) return "";
        return "float32 and square kernels of 3, 4, 5 or 7";
      case Conv2dKernel::kSmall:
        if (fits_small(p.height, p.width, p.kernel_height, p.kernel_width, p.elem_size)) return "";
        return "float32, square kernels of 3, 4 or 5 and images of 16 x 16 at most, or of 7 and 8 "
               "columns";
      case Conv2dKernel::kCells: {
        const CellsTile& cells = kCellsTiles[tile];
        if (fits_cells(cells, p.kernel_height, p.kernel_width, p.elem_size)) return "";
        const std::string size = std::to_string(cells.size);
        return "16 bits and kernels of " + size + " x " + size + " at most";
      }
      case Conv2dKernel::kNarrow: {
        const CellsTile& cells = kCellsTiles[tile];
        if (fits_narrow(cells, p.height, p.width, p.kernel_height, p.kernel_width, p.elem_size)) {
          return "";
        }
        const std::string size = std::to_string(cells.size);
        return "16 bits, images of 8 columns and up to 8 rows and kernels of " + size + " x " +
               size + " at most";
      }
      case Conv2dKernel::kBanded:
        if (fits_banded(p.kernel_height, p.kernel_width, p.elem_size)) return "";
        return "16 bits and kernels of 31 x 31 at most";
      case Conv2dKernel::kGeneral:
        break;
    }
    return "";
  }

  static Conv2dChoice make(const Conv2dProblem&, const Numbers& choice) {
    return {static_cast<Conv2dKernel>(choice[0]), static_cast<int>(choice[1])};
  }

  static std::vector<Numbers> candidates(const Conv2dProblem&) {
    std::vector<Numbers> all;
    for (int64_t kernel = 0; tiles_of(kernel) > 0; ++kernel) {
      for (int64_t tile = 0; tile < tiles_of(kernel); ++tile) all.push_back({kernel, tile});
    }
    return all;
  }

  // Rows and columns of a block's tile, for the cells kernel rows of a strip and cells on their
  // way; zeros where the kernel fits them to the image.
  static Columns columns(const Conv2dProblem&, const Numbers& choice) {
    const bool banded = choice[0] == static_cast<int64_t>(Conv2dKernel::kBanded);
    const bool cells = choice[0] == static_cast<int64_t>(Conv2dKernel::kCells);
    const BandedTile tile = banded ? kBandedTiles[choice[1]] : BandedTile{};
    const CellsTile strip = cells ? kCellsTiles[choice[1]] : CellsTile{};
    return {{"kernel", choice[0]},
            {"tile_rows", cells ? strip.strip_rows : tile.rows(kBandedWarps)},
            {"tile_columns", tile.columns()},
            {"ahead", strip.ahead}};
  }

 private:
  // How many tiles a kernel has, 0 where there is no such kernel.
  static int64_t tiles_of(int64_t kernel) {
    if (kernel < 0 || kernel > static_cast<int64_t>(Conv2dKernel::kNarrow)) return 0;
    switch (static_cast<Conv2dKernel>(kernel)) {
      case Conv2dKernel::kBanded:
        return kNumBandedTiles;
      case Conv2dKernel::kCells:
        return kNumCellsTiles;
      case Conv2dKernel::kNarrow:
        return kNumNarrowTiles;
      default:
        return 1;
    }
  }
};

}  // namespace torchweld
