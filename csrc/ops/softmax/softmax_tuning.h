// The configurations of a row softmax and its gradient, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/softmax/softmax_config.h"

namespace torchweld {

struct SoftmaxCall {
  SoftmaxProblem problem;
  int64_t rows;
  bool masked, bfloat16;
};

struct SoftmaxTuning {
  static constexpr const char* kName = "softmax";
  static constexpr Field kProblem[] = {
      {"n", 1, kMostSize},    {"elem_size", 2, 4}, {"aligned", 0, 1},
      {"backward", 0, 1},     {"tiled", 0, 1},     {"clusters", 0, 1},
      {"rows", 1, kMostSize}, {"masked", 0, 1},    {"bfloat16", 0, 1}};
  static constexpr const char* kChoice[] = {"tile"};

  using Problem = SoftmaxCall;
  using Choice = int;

  static Numbers numbers(const SoftmaxCall& call) {
    const SoftmaxProblem& p = call.problem;
    return {p.n,        p.elem_size, p.aligned,   p.backward,   p.tiled,
            p.clusters, call.rows,   call.masked, call.bfloat16};
  }
  static SoftmaxCall problem(const Numbers& x) {
    return {{x[0], x[1] == 4 ? 4 : 2, x[2] != 0, x[3] != 0, x[4] != 0, x[5] != 0},
            x[6],
            x[7] != 0,
            x[8] != 0};
  }
  static Numbers key(Numbers x) {
    x[6] = size_class(x[6]);
    return x;
  }

  static int choose(const SoftmaxCall& call) { return choose_softmax_tile(call.problem); }
  static Numbers told(int tile) { return {tile}; }

  static std::string refusal(const SoftmaxCall& call, const Numbers& choice) {
    const SoftmaxProblem& p = call.problem;
    if (choice[0] == -1) return "";
    if (choice[0] < 0 || choice[0] >= kNumSoftmaxTiles) {
      return no_such_tile(choice[0], kNumSoftmaxTiles);
    }
    const SoftmaxTile& tile = kSoftmaxTiles[choice[0]];
    if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
    if (tile.vector && !(p.aligned && p.n % (16 / p.elem_size) == 0)) {
      return "rows are not 16-byte aligned";
    }
    if (!tile.suits(p.elem_size, p.backward)) return "too many registers for this dtype";
    if (tile.cluster > 1 && !p.clusters) return "the GPU has no thread-block clusters";
    if (p.n > tile.capacity(p.elem_size)) {
      return "holds " + std::to_string(tile.capacity(p.elem_size)) + " elements, the row has " +
             std::to_string(p.n);
    }
    return "";
  }

  static int make(const SoftmaxCall&, const Numbers& choice) { return static_cast<int>(choice[0]); }

  static std::vector<Numbers> candidates(const SoftmaxCall&) {
    return tiles_or_none(kNumSoftmaxTiles);
  }

  // A row that is read again has no loads of its own.
  static Columns columns(const SoftmaxCall& call, const Numbers& choice) {
    const SoftmaxProblem& p = call.problem;
    if (choice[0] < 0) {
      const bool vector = p.aligned && p.n % (16 / p.elem_size) == 0;
      return {{"blocks_per_row", 1},
              {"threads", kSoftmaxStreamThreads},
              {"loads", 0},
              {"access_bytes", vector ? 16 : p.elem_size}};
    }
    const SoftmaxTile& tile = kSoftmaxTiles[choice[0]];
    return {{"blocks_per_row", tile.cluster},
            {"threads", tile.threads},
            {"loads", tile.loads},
            {"access_bytes", tile.vector ? 16 : p.elem_size}};
  }
};

}  // namespace torchweld
