// The kernel family of row softmax and its backward. This is pure host code.
#pragma once

#include "core/family.h"
#include "softmax/config.h"

namespace torchweld {

struct SoftmaxFamily {
  static constexpr const char* kName = "softmax";
  static constexpr Field kFields[] = {
      {"n", 1, kMaxSize}, {"elem_size", 2, 4}, {"aligned", 0, 1},     {"backward", 0, 1},
      {"tiled", 0, 1},    {"in_phase", 0, 1},  {"rows", 1, kMaxSize}, {"masked", 0, 1},
      {"bfloat16", 0, 1}, {"capped", 0, 1}};
  static constexpr const char* kEngines[] = {"tile", "ring", "stream"};
  static constexpr bool kFirstLegal = true;

  using Problem = SoftmaxProblem;
  using Choice = SoftmaxChoice;

  static Encoded encode_fields(const SoftmaxProblem& p) {
    return {p.n,        p.elem_size, p.aligned, p.backward, p.tiled,
            p.in_phase, p.rows,      p.masked,  p.bfloat16, p.capped};
  }
  static SoftmaxProblem decode_fields(const Encoded& x) {
    return {x[0], x[1] == 4 ? 4 : 2, x[2] != 0, x[3] != 0, x[4] != 0, x[5] != 0,
            x[6], x[7] != 0,         x[8] != 0, x[9] != 0, {}};
  }
  static Encoded shape_class(Encoded x) {
    x[6] = size_class(x[6]);
    return x;
  }

  static SoftmaxChoice choose(const SoftmaxProblem& p) { return choose_softmax(p); }
  static Encoded encode(const SoftmaxChoice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile};
  }
  static SoftmaxChoice make(const SoftmaxProblem&, const Encoded& x) {
    return {engine(x), static_cast<int>(x[1])};
  }

  static Refusal refusal(const SoftmaxProblem& p, const Encoded& x) {
    if (engine(x) == SoftmaxEngine::kTile) return softmax_refusal(p, kSoftmaxTiles[x[1]]);
    if (engine(x) == SoftmaxEngine::kRing) return softmax_refusal(p, kSoftmaxRings[x[1]]);
    return {};
  }

  static std::vector<Encoded> candidates(const SoftmaxProblem&) {
    std::vector<Encoded> all;
    for (int i = 0; i < kNumSoftmaxTiles; ++i) all.push_back(encode({SoftmaxEngine::kTile, i}));
    for (int i = 0; i < kNumSoftmaxRings; ++i) all.push_back(encode({SoftmaxEngine::kRing, i}));
    all.push_back(encode({SoftmaxEngine::kStream, 0}));
    return all;
  }

  // Returns the text for a configuration. For a tile, the text is the threads and loads. For a
  // ring, it is the cluster size. For a stream, it is empty.
  static std::string tile(const Encoded& x) {
    if (engine(x) == SoftmaxEngine::kStream) return "";
    if (engine(x) == SoftmaxEngine::kRing) return std::to_string(kSoftmaxRings[x[1]].cluster);
    return tile_text(kSoftmaxTiles[x[1]].threads, kSoftmaxTiles[x[1]].loads);
  }

  // For a ring, `threads` is the number of consumer threads of all groups, and `loads` is the
  // number of accesses per thread and chunk. For a stream, there is no `loads`.
  static Columns columns(const SoftmaxProblem& p, const Encoded& x) {
    if (engine(x) == SoftmaxEngine::kRing) {
      const SoftmaxRing& ring = kSoftmaxRings[x[1]];
      return {{"threads", ring.kGroups * ring.kThreads},
              {"loads", ring.accesses(p.backward)},
              {"cluster", ring.cluster},
              {"groups", ring.kGroups},
              {"ring_bytes", ring.shared_bytes()},
              {"capacity", ring.capacity(p.elem_size, p.backward, p.aligned)},
              {"read_once_to", ring.read_once_to(p.elem_size, p.backward, p.aligned)}};
    }
    if (engine(x) == SoftmaxEngine::kStream) return row(softmax_stream_threads(p), 0, 0);
    const SoftmaxTile& tile = kSoftmaxTiles[x[1]];
    const int64_t capacity = tile.capacity(p.elem_size, p.aligned);
    return row(tile.threads_for(p.n, p.elem_size), tile.loads, capacity);
  }

  static std::string kernel(const SoftmaxProblem& p, const Encoded& x) {
    if (engine(x) == SoftmaxEngine::kTile) return "rows in registers (one read)";
    if (engine(x) == SoftmaxEngine::kStream) return "streaming rows (two reads)";
    const bool once = p.n <= kSoftmaxRings[x[1]].read_once_to(p.elem_size, p.backward, p.aligned);
    return std::string("rows in shared memory (") + (once ? "one read" : "a slice is read twice") +
           ")";
  }

  static std::string why(const SoftmaxProblem& p, const Encoded& x) {
    const std::string row = "a row of " + std::to_string(p.n) + " elements";
    if (engine(x) == SoftmaxEngine::kTile) return "the first tile that holds " + row;
    if (engine(x) == SoftmaxEngine::kRing)
      return "the smallest preferred cluster that holds " + row;
    if (softmax_needs_scores(p)) return "softcap and sink: the gradient reads the scores too";
    return softmax_reads_twice(p) ? row + " would need registers that leave one block per SM"
                                  : "no tile and no ring holds " + row;
  }

 private:
  static SoftmaxEngine engine(const Encoded& x) { return static_cast<SoftmaxEngine>(x[0]); }
  static Columns row(int threads, int loads, int64_t capacity) {
    return {{"threads", threads},
            {"loads", loads},
            {"cluster", 1},
            {"groups", 1},
            {"ring_bytes", 0},
            {"capacity", capacity},
            {"read_once_to", capacity}};
  }
};

}  // namespace torchweld
