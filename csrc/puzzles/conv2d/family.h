// The kernel family of single-channel convolutions. This is pure host code.
#pragma once

#include "core/family.h"
#include "puzzles/conv2d/config.h"

namespace torchweld {

struct Conv2dProblem {
  int64_t batch, height, width;
  int64_t kernel_height, kernel_width;
  int elem_size;
  bool flipped, bfloat16;
  DeviceFacts device;
};

// `tile` is an index into kCellsTiles for kCells. For other engines it is 0.
struct Conv2dChoice {
  Conv2dEngine engine;
  int tile;
};

struct Conv2dFamily {
  static constexpr const char* kName = "conv2d";
  static constexpr Field kFields[] = {{"batch", 1, kMaxSize},
                                      {"height", 1, kMaxSize},
                                      {"width", 1, kMaxSize},
                                      {"kernel_height", 1, kMaxSize},
                                      {"kernel_width", 1, kMaxSize},
                                      {"elem_size", 2, 4},
                                      {"flipped", 0, 1},
                                      {"bfloat16", 0, 1}};
  // The names are in the order of Conv2dEngine.
  static constexpr const char* kEngines[] = {"direct", "cells", "general"};
  static constexpr bool kFirstLegal = false;

  using Problem = Conv2dProblem;
  using Choice = Conv2dChoice;

  static Encoded encode_fields(const Conv2dProblem& p) {
    return {p.batch,        p.height,    p.width,   p.kernel_height,
            p.kernel_width, p.elem_size, p.flipped, p.bfloat16};
  }
  static Conv2dProblem decode_fields(const Encoded& x) {
    return {x[0], x[1], x[2], x[3], x[4], x[5] == 4 ? 4 : 2, x[6] != 0, x[7] != 0, {}};
  }
  static Encoded shape_class(Encoded x) {
    for (int i = 0; i < 3; ++i) x[i] = size_class(x[i]);
    return x;
  }

  static Conv2dChoice choose(const Conv2dProblem& p) {
    const Conv2dEngine engine = choose_conv2d(p.kernel_height, p.kernel_width, p.elem_size);
    const bool cells = engine == Conv2dEngine::kCells;
    return {engine, cells ? choose_cells_tile(p.kernel_height, p.kernel_width) : 0};
  }
  static Encoded encode(const Conv2dChoice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile};
  }

  static Refusal refusal(const Conv2dProblem& p, const Encoded& x) {
    const int64_t height = p.kernel_height, width = p.kernel_width;
    switch (static_cast<Conv2dEngine>(x[0])) {
      case Conv2dEngine::kDirect:
        if (fits_direct(height, width, p.elem_size)) break;
        return "float32 and square kernels of 3, 4, 5 or 7";
      case Conv2dEngine::kCells:
        if (fits_cells(kCellsTiles[x[1]], height, width, p.elem_size)) break;
        return {"16 bits and kernels of {} x {} at most", kCellsTiles[x[1]].size,
                kCellsTiles[x[1]].size};
      case Conv2dEngine::kGeneral:
        break;
    }
    return {};
  }

  static Conv2dChoice make(const Conv2dProblem&, const Encoded& choice) {
    return {static_cast<Conv2dEngine>(choice[0]), static_cast<int>(choice[1])};
  }

  static std::vector<Encoded> candidates(const Conv2dProblem&) {
    std::vector<Encoded> all;
    for (int64_t kernel = 0; tiles_of(kernel) > 0; ++kernel) {
      for (int64_t tile = 0; tile < tiles_of(kernel); ++tile) all.push_back({kernel, tile});
    }
    return all;
  }

  // Returns the text for a configuration: for cells, the maximum size of the convolution kernel.
  static std::string tile(const Encoded& x) {
    const bool cells = x[0] == static_cast<int64_t>(Conv2dEngine::kCells);
    return cells ? tile_text(kCellsTiles[x[1]].size, kCellsTiles[x[1]].size) : "";
  }

  // Returns the rows of a strip and the number of cells in flight, for the cells kernel. For a
  // kernel that computes its tile from the image, the values are zeros.
  static Columns columns(const Conv2dProblem&, const Encoded& x) {
    const bool cells = x[0] == static_cast<int64_t>(Conv2dEngine::kCells);
    const CellsTile strip = cells ? kCellsTiles[x[1]] : CellsTile{};
    return {{"tile_rows", strip.strip_rows}, {"ahead", strip.ahead}};
  }

  static std::string kernel(const Conv2dProblem&, const Encoded& x) {
    constexpr const char* kKernels[] = {"direct, in registers", "cells, on tensor cores",
                                        "general"};
    return kKernels[x[0]];
  }
  static std::string why(const Conv2dProblem&, const Encoded&) {
    return "what the dtype and the sizes allow";
  }

 private:
  // Returns the number of tiles of an engine, or 0 if there is no such engine.
  static int64_t tiles_of(int64_t kernel) {
    if (kernel < 0 || kernel > static_cast<int64_t>(Conv2dEngine::kGeneral)) return 0;
    return kernel == static_cast<int64_t>(Conv2dEngine::kCells) ? kNumCellsTiles : 1;
  }
};

}  // namespace torchweld
