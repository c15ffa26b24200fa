// The configurations of a product, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "gemm/gemm_config.h"

namespace torchweld {

struct GemmCall {
  GemmProblem problem;
  bool a_k_major, b_k_major;  // each layout is a kernel of its own
};

struct GemmTuning {
  static constexpr const char* kName = "matmul";
  static constexpr Field kProblem[] = {{"m", 1, kMostSize},
                                       {"n", 1, kMostSize},
                                       {"k", 0, kMostSize},
                                       {"batch", 1, kMostSize},
                                       {"gated", 0, 1},
                                       {"pointwise", 0, 1},
                                       {"math", 0, 3},
                                       {"sms", 1, kMostMultiprocessors},
                                       {"shared_limit", 0, kMostSharedBytes},
                                       {"a_k_major", 0, 1},
                                       {"b_k_major", 0, 1}};
  static constexpr const char* kChoice[] = {"tile", "splits"};
  static constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
  static constexpr int kMostSplits = 32;

  using Problem = GemmCall;
  using Choice = GemmChoice;

  static Numbers numbers(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    return {p.m,
            p.n,
            p.k,
            p.batch,
            p.gated,
            p.pointwise,
            static_cast<int64_t>(p.math),
            p.sms,
            p.shared_limit,
            call.a_k_major,
            call.b_k_major};
  }
  static GemmCall problem(const Numbers& x) {
    return {{x[0], x[1], x[2], x[3], x[4] != 0, x[5] != 0, static_cast<GemmMath>(x[6]),
             static_cast<int>(x[7]), static_cast<int>(x[8])},
            x[9] != 0,
            x[10] != 0};
  }
  static Numbers key(Numbers x) {
    x[0] = size_class(x[0]);
    x[3] = size_class(x[3]);
    return x;
  }

  static GemmChoice choose(const GemmCall& call) { return choose_gemm(call.problem); }
  static Numbers told(const GemmChoice& choice) { return {choice.tile, choice.splits}; }

  static int64_t steps(const GemmProblem& p) {
    const int64_t step = kGemmStepBytes / gemm_elem_size(p.math);
    return p.k <= step ? 1 : (p.k + step - 1) / step;
  }

  static std::string refusal(const GemmCall& call, const Numbers& choice) {
    constexpr int64_t kMaxSteps = int64_t{1} << 24;  // the kernels count a split's K in 32 bits
    const GemmProblem& p = call.problem;
    const int64_t splits = choice[1], all = steps(p);
    if (choice[0] < 0 || choice[0] >= kGemmTileCount)
      return no_such_tile(choice[0], kGemmTileCount);
    const GemmTile& tile = kGemmTiles[choice[0]];
    if (!tile.suits(p.math)) {
      return tile.fp32 ? "the tile is for float32 alone, whose pieces need its registers"
                       : "the tile leaves no registers for the pieces of float32";
    }
    if (tile.shared_bytes() > p.shared_limit) {
      return too_much_shared_memory(tile.shared_bytes(), p.shared_limit);
    }
    if (splits < 1 || splits > kMostSplits) return "K can be cut into 1 to 32 parts";
    const int64_t part = (all + splits - 1) / splits;
    if ((splits - 1) * part >= all) {
      return "K has " + std::to_string(all) + " steps, which leaves one of " +
             std::to_string(splits) + " parts empty";
    }
    if (part > kMaxSteps) return "a part of K would have more than 2^24 steps";
    const double width = p.gated ? 2.0 * p.n : p.n;
    const double blocks = (double(p.m) / tile.block_m + 1) * (width / tile.block_n + 1) * splits *
                          static_cast<double>(p.batch);
    return grid_fits(blocks) ? "" : "more than 2^31 - 1 tiles";
  }

  static GemmChoice make(const GemmCall& call, const Numbers& choice) {
    const GemmProblem& p = call.problem;
    const int64_t part = (steps(p) + choice[1] - 1) / choice[1];
    return {static_cast<int>(choice[0]), static_cast<int>(choice[1]),
            part * (kGemmStepBytes / gemm_elem_size(p.math))};
  }

  // A tile that can't serve the product at all is listed once.
  static std::vector<Numbers> candidates(const GemmCall& call) {
    std::vector<Numbers> all;
    for (int tile = 0; tile < kGemmTileCount; ++tile) {
      const bool serves = refusal(call, {tile, 1}).empty();
      for (const int splits : kSplits) {
        if (splits == 1 || serves) all.push_back({tile, splits});
      }
    }
    return all;
  }

  static Columns columns(const GemmCall& call, const Numbers& choice) {
    const GemmTile& tile = kGemmTiles[choice[0]];
    return {{"block_m", tile.block_m},
            {"block_n", tile.block_n},
            {"block_k", kGemmStepBytes / gemm_elem_size(call.problem.math)},
            {"splits", choice[1]},
            {"stages", tile.stages},
            {"warps", tile.warps_m * tile.warps_n}};
  }
};

}  // namespace torchweld
