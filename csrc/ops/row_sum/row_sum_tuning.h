// The configurations of a sum over rows, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/row_sum/row_sum_config.h"

namespace torchweld {

struct RowSumCall {
  RowSumProblem problem;
  bool bfloat16;
};

struct RowSumTuning {
  static constexpr const char* kName = "row_sum";
  static constexpr Field kProblem[] = {{"rows", 1, kMostSize}, {"n", 1, kMostSize},
                                       {"elem_size", 2, 4},    {"contiguous", 0, 1},
                                       {"aligned", 0, 1},      {"sms", 1, kMostMultiprocessors},
                                       {"bfloat16", 0, 1}};
  static constexpr const char* kChoice[] = {"tile", "parts"};
  static constexpr int kLast = kNumRowSumTiles - 1;  // the tile that rows may be cut for

  using Problem = RowSumCall;
  using Choice = RowSumChoice;

  static Numbers numbers(const RowSumCall& call) {
    const RowSumProblem& p = call.problem;
    return {p.rows, p.n, p.elem_size, p.contiguous, p.aligned, p.sms, call.bfloat16};
  }
  static RowSumCall problem(const Numbers& x) {
    return {{x[0], x[1], x[2] == 4 ? 4 : 2, x[3] != 0, x[4] != 0, static_cast<int>(x[5])},
            x[6] != 0};
  }
  static Numbers key(Numbers x) {
    x[0] = size_class(x[0]);
    return x;
  }

  static RowSumChoice choose(const RowSumCall& call) { return choose_row_sum(call.problem); }
  static Numbers told(const RowSumChoice& choice) { return {choice.tile, choice.parts}; }

  // Whole rounds of the block, so that every part starts as the row does with respect to 16 bytes.
  static int64_t part_elems(const RowSumProblem& p, int64_t parts) {
    const RowSumTile& tile = kRowSumTiles[kLast];
    const int64_t round = int64_t{16} / p.elem_size * tile.threads * tile.loads;
    const int64_t part = (p.n + parts - 1) / parts;
    return (part + round - 1) / round * round;
  }

  static std::string refusal(const RowSumCall& call, const Numbers& choice) {
    const RowSumProblem& p = call.problem;
    const int64_t tile = choice[0], parts = choice[1];
    if (tile == kRowSumStaged) {
      if (!p.contiguous) return "the rows do not follow each other in memory";
      if (p.n * p.elem_size > kStagedRowBytes) {
        return "too much shared memory: rows of more than " + std::to_string(kStagedRowBytes) +
               " bytes";
      }
    } else if (tile < 0 || tile >= kNumRowSumTiles) {
      return no_such_tile(tile, kNumRowSumTiles);
    }
    if (parts == 1) return "";
    if (parts < 1 || parts > kMaxParts) return "a row can be cut into 1 to 4096 parts";
    if (tile != kLast) return "only the tile of a whole block cuts rows";
    if (p.rows > kMaxSplitRows) return "more than 16384 rows are not cut";
    return (parts - 1) * part_elems(p, parts) >= p.n ? "the row is too short for so many parts"
                                                     : "";
  }

  static RowSumChoice make(const RowSumCall& call, const Numbers& choice) {
    const int64_t parts = choice[1], n = call.problem.n;
    return {static_cast<int>(choice[0]), parts, parts == 1 ? n : part_elems(call.problem, parts)};
  }

  static std::vector<Numbers> candidates(const RowSumCall& call) {
    std::vector<Numbers> all = {{kRowSumStaged, 1}};
    for (int tile = 0; tile < kNumRowSumTiles; ++tile) all.push_back({tile, 1});
    for (int parts = 2; parts <= kMaxParts; parts *= 2) {
      if (refusal(call, {kLast, parts}).empty()) all.push_back({kLast, parts});
    }
    const Numbers own = told(choose(call));
    for (const Numbers& known : all) {
      if (known == own) return all;
    }
    all.push_back(own);
    return all;
  }

  // No loads: the rows go through shared memory as one stretch.
  static Columns columns(const RowSumCall&, const Numbers& choice) {
    const bool staged = choice[0] == kRowSumStaged;
    return {{"row_threads", staged ? 0 : kRowSumTiles[choice[0]].threads},
            {"loads", staged ? 0 : kRowSumTiles[choice[0]].loads},
            {"parts", choice[1]},
            {"threads", kRowSumThreads}};
  }
};

}  // namespace torchweld
