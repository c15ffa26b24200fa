// The configurations of attention and its gradient, for tune. Pure host code.
#pragma once

#include "core/tuning.h"
#include "ops/attention/attention_backward_config.h"
#include "ops/attention/attention_config.h"

namespace torchweld {

// What else decides how long a call takes.
struct AttentionLoad {
  int64_t heads;  // batch * nheads
  int64_t group;  // query heads that share a kv head
  bool causal, padded, bfloat16;
};

struct AttentionCall {
  AttentionProblem problem;
  AttentionLoad load;
};

struct AttentionBackwardCall {
  AttentionBackwardProblem problem;
  int64_t seqlen_q, seqlen_k;
  AttentionLoad load;
};

// Heads and sequence lengths stand first in both families.
inline Numbers attention_key(Numbers x) {
  for (int i = 0; i < 3; ++i) x[i] = size_class(x[i]);
  return x;
}

struct AttentionTuning {
  static constexpr const char* kName = "attention";
  static constexpr Field kProblem[] = {{"heads", 1, kMostSize},
                                       {"seqlen_q", 1, kMostSize},
                                       {"seqlen_k", 0, kMostSize},
                                       {"head_dim", 0, kMostSize},
                                       {"head_dim_v", 0, kMostSize},
                                       {"math", 0, 2},
                                       {"group", 1, kMostSize},
                                       {"causal", 0, 1},
                                       {"padded", 0, 1},
                                       {"bfloat16", 0, 1}};
  static constexpr const char* kChoice[] = {"tile"};

  using Problem = AttentionCall;
  using Choice = int;

  static Numbers numbers(const AttentionCall& call) {
    const AttentionProblem& p = call.problem;
    return {call.load.heads,   p.seqlen_q,       p.seqlen_k,
            p.head_dim,        p.head_dim_v,     static_cast<int64_t>(p.math),
            call.load.group,   call.load.causal, call.load.padded,
            call.load.bfloat16};
  }
  static AttentionCall problem(const Numbers& x) {
    return {{x[1], x[2], x[3], x[4], static_cast<AttentionMath>(x[5])},
            {x[0], x[6], x[7] != 0, x[8] != 0, x[9] != 0}};
  }
  static Numbers key(const Numbers& x) { return attention_key(x); }

  static int choose(const AttentionCall& call) { return choose_attention_tile(call.problem); }
  static Numbers told(int tile) { return {tile}; }

  static std::string refusal(const AttentionCall& call, const Numbers& choice) {
    const AttentionProblem& p = call.problem;
    if (choice[0] == -1) return "";
    if (choice[0] < 0 || choice[0] >= kNumAttentionTiles) {
      return no_such_tile(choice[0], kNumAttentionTiles);
    }
    const AttentionTile& tile = kAttentionTiles[choice[0]];
    if (tile.math != p.math) return "the tile is for another dtype";
    if (p.head_dim > tile.dim || p.head_dim_v > tile.dim) {
      return "the tile holds head dims to " + std::to_string(tile.dim);
    }
    // What choose_attention_tile gives to the general kernel, every tile refuses.
    return choose(call) < 0 ? "no tile takes these sizes" : "";
  }

  static int make(const AttentionCall&, const Numbers& choice) {
    return static_cast<int>(choice[0]);
  }

  static std::vector<Numbers> candidates(const AttentionCall&) {
    return tiles_or_none(kNumAttentionTiles);
  }

  // Zeros: the general kernel, which has no tile.
  static Columns columns(const AttentionCall&, const Numbers& choice) {
    const AttentionTile tile = choice[0] < 0 ? AttentionTile{} : kAttentionTiles[choice[0]];
    return {{"rows", tile.rows},
            {"keys", tile.keys},
            {"head_dim", tile.dim},
            {"stages", tile.stages},
            {"warps", tile.warps}};
  }
};

struct AttentionBackwardTuning {
  static constexpr const char* kName = "attention_backward";
  static constexpr Field kProblem[] = {{"heads", 1, kMostSize},
                                       {"seqlen_q", 0, kMostSize},
                                       {"seqlen_k", 0, kMostSize},
                                       {"head_dim", 0, kMostSize},
                                       {"head_dim_v", 0, kMostSize},
                                       {"math", 0, 2},
                                       {"group", 1, kMostSize},
                                       {"causal", 0, 1},
                                       {"padded", 0, 1},
                                       {"bfloat16", 0, 1},
                                       {"shared_limit", 0, kMostSharedBytes}};
  static constexpr const char* kChoice[] = {"tile"};

  using Problem = AttentionBackwardCall;
  using Choice = int;

  static Numbers numbers(const AttentionBackwardCall& call) {
    const AttentionBackwardProblem& p = call.problem;
    return {call.load.heads,    call.seqlen_q,    call.seqlen_k,
            p.head_dim,         p.head_dim_v,     static_cast<int64_t>(p.math),
            call.load.group,    call.load.causal, call.load.padded,
            call.load.bfloat16, p.shared_bytes};
  }
  static AttentionBackwardCall problem(const Numbers& x) {
    return {{x[3], x[4], static_cast<AttentionMath>(x[5]), static_cast<int>(x[10])},
            x[1],
            x[2],
            {x[0], x[6], x[7] != 0, x[8] != 0, x[9] != 0}};
  }
  static Numbers key(const Numbers& x) { return attention_key(x); }

  static int choose(const AttentionBackwardCall& call) {
    return choose_attention_backward_tile(call.problem);
  }
  static Numbers told(int tile) { return {tile}; }

  static std::string refusal(const AttentionBackwardCall& call, const Numbers& choice) {
    const AttentionBackwardProblem& p = call.problem;
    if (choice[0] == -1) return "";
    if (choice[0] < 0 || choice[0] >= kNumAttentionBackwardTiles) {
      return no_such_tile(choice[0], kNumAttentionBackwardTiles);
    }
    const AttentionBackwardTile& tile = kAttentionBackwardTiles[choice[0]];
    const bool serves = tile.math == p.math ||
                        (tile.math == AttentionMath::kFloat32 && p.math == AttentionMath::kTf32);
    if (!serves) return "the tile is for another dtype";
    // NOTE: dQ's scratch has room for these columns and no more; a wider tile would write beyond
    // it.
    const int64_t wide = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    if (wide > tile.head_dim ||
        tile.head_dim > attention_backward_dq_columns(p.head_dim, p.head_dim_v)) {
      return "the tile is for head dims of " + std::to_string(tile.head_dim / 2 + 1) + " to " +
             std::to_string(tile.head_dim);
    }
    if (tile.shared_bytes() > p.shared_bytes) {
      return too_much_shared_memory(tile.shared_bytes(), p.shared_bytes);
    }
    return "";
  }

  static int make(const AttentionBackwardCall&, const Numbers& choice) {
    return static_cast<int>(choice[0]);
  }

  static std::vector<Numbers> candidates(const AttentionBackwardCall&) {
    return tiles_or_none(kNumAttentionBackwardTiles);
  }

  // Zeros: the general kernels, which have no tile.
  static Columns columns(const AttentionBackwardCall&, const Numbers& choice) {
    const AttentionBackwardTile tile =
        choice[0] < 0 ? AttentionBackwardTile{} : kAttentionBackwardTiles[choice[0]];
    return {{"keys", tile.keys},         {"rows", tile.rows},   {"cols", tile.cols},
            {"head_dim", tile.head_dim}, {"warps", tile.warps}, {"groups", tile.groups}};
  }
};

}  // namespace torchweld
