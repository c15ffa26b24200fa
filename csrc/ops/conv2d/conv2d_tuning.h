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

// `tile` is one of the banded kernel's, 0 for the others.
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
    const Conv2dKernel kernel = choose_conv2d(p.kernel_height, p.kernel_width, p.elem_size);
    return {kernel, kernel == Conv2dKernel::kBanded ? choose_banded_tile(p.width) : 0};
  }
  static Numbers told(const Conv2dChoice& choice) {
    return {static_cast<int64_t>(choice.kernel), choice.tile};
  }

  static std::string refusal(const Conv2dProblem& p, const Numbers& choice) {
    const Conv2dKernel fitting = choose_conv2d(p.kernel_height, p.kernel_width, p.elem_size);
    if (choice[0] == static_cast<int64_t>(Conv2dKernel::kBanded)) {
      if (choice[1] < 0 || choice[1] >= kNumBandedTiles) {
        return no_such_tile(choice[1], kNumBandedTiles);
      }
      return fitting == Conv2dKernel::kBanded ? "" : "16 bits and kernels of 31 x 31 at most";
    }
    if (choice[1] != 0) return "the kernel has one tile";
    if (choice[0] == static_cast<int64_t>(Conv2dKernel::kDirect)) {
      return fitting == Conv2dKernel::kDirect ? "" : "float32 and square kernels of 3, 4, 5 or 7";
    }
    return choice[0] == static_cast<int64_t>(Conv2dKernel::kGeneral) ? ""
                                                                     : "there is no such kernel";
  }

  static Conv2dChoice make(const Conv2dProblem&, const Numbers& choice) {
    return {static_cast<Conv2dKernel>(choice[0]), static_cast<int>(choice[1])};
  }

  static std::vector<Numbers> candidates(const Conv2dProblem&) {
    std::vector<Numbers> all = {{static_cast<int64_t>(Conv2dKernel::kDirect), 0}};
    for (int tile = 0; tile < kNumBandedTiles; ++tile) {
      all.push_back({static_cast<int64_t>(Conv2dKernel::kBanded), tile});
    }
    all.push_back({static_cast<int64_t>(Conv2dKernel::kGeneral), 0});
    return all;
  }

  // Rows and columns of a block's tile; zeros where the kernel fits them to the image.
  static Columns columns(const Conv2dProblem&, const Numbers& choice) {
    const bool banded = choice[0] == static_cast<int64_t>(Conv2dKernel::kBanded);
    const BandedTile tile = banded ? kBandedTiles[choice[1]] : BandedTile{};
    return {{"kernel", choice[0]},
            {"tile_rows", tile.rows(kBandedWarps)},
            {"tile_columns", tile.columns()}};
  }
};

}  // namespace torchweld
