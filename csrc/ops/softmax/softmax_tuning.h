// The configurations of a row softmax and its gradient, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/softmax/softmax_config.h"

namespace torchweld {

struct SoftmaxCall {
  SoftmaxProblem problem;
  int64_t rows;
  bool bfloat16;
};

// The choice is a tile, then the rings, or -1 for the streaming kernel.
struct SoftmaxTuning {
  static constexpr const char* kName = "softmax";
  static constexpr Field kProblem[] = {
      {"n", 1, kMostSize},    {"elem_size", 2, 4},
      {"aligned", 0, 1},      {"backward", 0, 1},
      {"tiled", 0, 1},        {"clusters", 0, 1},
      {"in_phase", 0, 1},     {"shared_limit", 0, kMostSharedBytes},
      {"rows", 1, kMostSize}, {"masked", 0, 1},
      {"bfloat16", 0, 1},     {"clusters_of_16", 0, 1}};
  static constexpr const char* kChoice[] = {"tile"};
  static constexpr int kAll = kNumSoftmaxTiles + kNumSoftmaxRings;

  using Problem = SoftmaxCall;
  using Choice = SoftmaxChoice;

  static Numbers numbers(const SoftmaxCall& call) {
    const SoftmaxProblem& p = call.problem;
    return {p.n,        p.elem_size,    p.aligned, p.backward, p.tiled,       p.clusters,
            p.in_phase, p.shared_limit, call.rows, p.masked,   call.bfloat16, p.clusters_of_16};
  }
  static SoftmaxCall problem(const Numbers& x) {
    return {{x[0], x[1] == 4 ? 4 : 2, x[2] != 0, x[3] != 0, x[4] != 0, x[5] != 0, x[6] != 0,
             static_cast<int>(x[7]), x[9] != 0, x[11] != 0},
            x[8],
            x[10] != 0};
  }
  static Numbers key(Numbers x) {
    x[8] = size_class(x[8]);
    return x;
  }

  static SoftmaxChoice choose(const SoftmaxCall& call) { return choose_softmax(call.problem); }
  static Numbers told(const SoftmaxChoice& choice) {
    const bool ring = choice.kernel == SoftmaxKernel::kRing;
    return {ring ? kNumSoftmaxTiles + choice.index : choice.index};
  }

  static std::string refusal(const SoftmaxCall& call, const Numbers& choice) {
    const SoftmaxProblem& p = call.problem;
    if (choice[0] == -1) return "";
    if (choice[0] < 0 || choice[0] >= kAll) return no_such_tile(choice[0], kAll);
    const SoftmaxChoice chosen = make(call, choice);
    if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
    if (chosen.kernel == SoftmaxKernel::kTile) {
      const SoftmaxTile& tile = kSoftmaxTiles[chosen.index];
      if (!tile.serves(p.elem_size, p.backward, p.masked)) {
        return tile.rows == SoftmaxRows::kScores ? "for 16-bit scores under a mask"
                                                 : "16-bit scores under a mask have other tiles";
      }
      if (!tile.suits(p.elem_size, p.backward, p.masked)) {
        return "too many registers for this dtype";
      }
      return room(p, tile.capacity(p.elem_size, p.aligned));
    }
    const SoftmaxRing& ring = kSoftmaxRings[chosen.index];
    if (!ring.serves(p.backward)) return "for the gradient alone";
    if (!p.clusters) return "the GPU, or the code built for it, has no thread-block clusters";
    if (!ring.portable() && !p.clusters_of_16) return "clusters of 16 do not fit on the GPU";
    if (!p.in_phase) {
      return "the tensors' rows start at different distances from 16-byte boundaries";
    }
    if (ring.shared_bytes() > p.shared_limit) {
      return too_much_shared_memory(ring.shared_bytes(), p.shared_limit);
    }
    return room(p, ring.capacity(p.elem_size, p.backward, p.aligned));
  }

  static SoftmaxChoice make(const SoftmaxCall&, const Numbers& choice) {
    const int number = static_cast<int>(choice[0]);
    if (number < 0) return {SoftmaxKernel::kStream, -1};
    if (number < kNumSoftmaxTiles) return {SoftmaxKernel::kTile, number};
    return {SoftmaxKernel::kRing, number - kNumSoftmaxTiles};
  }

  static std::vector<Numbers> candidates(const SoftmaxCall&) { return tiles_or_none(kAll); }

  // `kind` is a SoftmaxKernel. A row that is read again has no loads of its own. A ring's threads
  // are those that compute, in groups that have a row each; its loads are a thread's of a piece.
  static Columns columns(const SoftmaxCall& call, const Numbers& choice) {
    const SoftmaxChoice chosen = make(call, choice);
    const int64_t kind = static_cast<int64_t>(chosen.kernel);
    if (chosen.kernel == SoftmaxKernel::kRing) {
      const SoftmaxRing& ring = kSoftmaxRings[chosen.index];
      return row(kind, ring.kGroups * ring.kThreads, ring.accesses(call.problem.backward),
                 ring.cluster, ring.kGroups, ring.shared_bytes());
    }
    if (chosen.kernel == SoftmaxKernel::kStream)
      return row(kind, kSoftmaxStreamThreads, 0, 1, 1, 0);
    const SoftmaxTile& tile = kSoftmaxTiles[chosen.index];
    const SoftmaxProblem& p = call.problem;
    return row(kind, tile.threads_for(p.n, p.elem_size), tile.loads, 1, 1, 0);
  }

 private:
  static std::string room(const SoftmaxProblem& p, int64_t capacity) {
    if (p.n <= capacity) return "";
    return "holds " + std::to_string(capacity) + " elements, the row has " + std::to_string(p.n);
  }
  static Columns row(int64_t kind, int threads, int loads, int cluster, int groups,
                     int ring_bytes) {
    return {{"kind", kind},       {"threads", threads}, {"loads", loads},
            {"cluster", cluster}, {"groups", groups},   {"ring_bytes", ring_bytes}};
  }
};

}  // namespace torchweld
