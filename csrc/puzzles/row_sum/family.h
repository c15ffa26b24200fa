// The kernel family of the sums of rows. This is pure host code.
#pragma once

#include "core/family.h"
#include "puzzles/row_sum/config.h"

namespace torchweld {

struct RowSumFamily : FirstSizeByClass {
  static constexpr const char* kName = "row_sum";
  static constexpr Field kFields[] = {{"rows", 1, kMaxSize}, {"n", 1, kMaxSize},
                                      {"elem_size", 2, 4},   {"contiguous", 0, 1},
                                      {"aligned", 0, 1},     {"bfloat16", 0, 1}};
  static constexpr const char* kEngines[] = {"tile", "staged"};
  static constexpr bool kFirstLegal = false;
  static constexpr int kLast = kNumRowSumTiles - 1;  // the tile that supports splits

  using Problem = RowSumProblem;
  using Choice = RowSumChoice;

  static Encoded encode_fields(const RowSumProblem& p) {
    return {p.rows, p.n, p.elem_size, p.contiguous, p.aligned, p.bfloat16};
  }
  static RowSumProblem decode_fields(const Encoded& x) {
    return {x[0], x[1], x[2] == 4 ? 4 : 2, x[3] != 0, x[4] != 0, x[5] != 0, {}};
  }

  static RowSumChoice choose(const RowSumProblem& p) { return choose_row_sum(p); }
  static Encoded encode(const RowSumChoice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile, choice.splits};
  }
  static RowSumChoice make(const RowSumProblem& p, const Encoded& x) {
    return {static_cast<RowSumEngine>(x[0]), static_cast<int>(x[1]), x[2],
            x[2] == 1 ? p.n : row_sum_split_elems(p, x[2])};
  }

  static Refusal refusal(const RowSumProblem& p, const Encoded& x) {
    const int64_t splits = x[2];
    if (staged(x)) {
      if (!p.contiguous) return "the rows do not follow each other in memory";
      if (p.n * p.elem_size > kStagedRowBytes) {
        return {"too much shared memory: rows of more than {} bytes", kStagedRowBytes};
      }
    }
    if (splits == 1) return {};
    if (splits < 1 || splits > kMaxSplits) return {"a row can be split 1 to {} ways", kMaxSplits};
    if (staged(x) || x[1] != kLast) return "only the tile of a whole block splits rows";
    if (p.rows > kMaxSplitRows) return {"more than {} rows are not split", kMaxSplitRows};
    return (splits - 1) * row_sum_split_elems(p, splits) >= p.n
               ? Refusal("the row is too short for so many splits")
               : Refusal();
  }

  static std::vector<Encoded> candidates(const RowSumProblem& p) {
    std::vector<Encoded> all = {encode({RowSumEngine::kStaged, 0, 1, 0})};
    const auto add = [&](int tile, int64_t splits) {
      all.push_back(encode({RowSumEngine::kTile, tile, splits, 0}));
    };
    for (int tile = 0; tile < kNumRowSumTiles; ++tile) add(tile, 1);
    for (int64_t splits = 2; splits <= kMaxSplits; splits *= 2) {
      add(kLast, splits);
      if (refusal(p, all.back())) all.pop_back();
    }
    const Encoded heuristic = encode(choose(p));
    for (const Encoded& known : all) {
      if (known == heuristic) return all;
    }
    all.push_back(heuristic);
    return all;
  }

  static std::string tile(const Encoded& x) {
    return staged(x) ? "" : tile_text(kRowSumTiles[x[1]].threads, kRowSumTiles[x[1]].loads, x[2]);
  }

  // For kStaged, row_threads and loads don't exist, so these columns are 0.
  static Columns columns(const RowSumProblem&, const Encoded& x) {
    return {{"row_threads", staged(x) ? 0 : kRowSumTiles[x[1]].threads},
            {"loads", staged(x) ? 0 : kRowSumTiles[x[1]].loads},
            {"splits", x[2]},
            {"threads", kRowSumThreads}};
  }

  static std::string kernel(const RowSumProblem&, const Encoded& x) {
    return staged(x) ? "staged rows" : "rows by groups of threads";
  }
  static std::string why(const RowSumProblem& p, const Encoded&) {
    return "the first tile that reads rows of " + std::to_string(p.n) +
           " in one pass, or splits them";
  }

 private:
  static bool staged(const Encoded& x) {
    return static_cast<RowSumEngine>(x[0]) == RowSumEngine::kStaged;
  }
};

}  // namespace torchweld
