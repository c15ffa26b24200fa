// Lists the configurations of attention's forward and backward from which `tune` chooses. This is
// host code.
#pragma once

#include "attention/bwd_config.h"
#include "attention/config.h"
#include "core/family.h"

namespace torchweld {

// The fields of a problem, used by both the forward and the backward.
struct AttentionNumbers {
  static constexpr Field kFields[] = {{"heads", 1, kMaxSize},
                                      {"seqlen_q", 0, kMaxSize},
                                      {"seqlen_k", 0, kMaxSize},
                                      {"head_dim", 0, kMaxSize},
                                      {"head_dim_v", 0, kMaxSize},
                                      {"math", 0, 2},
                                      {"group", 1, kMaxSize},
                                      {"causal", 0, 1},
                                      {"padded", 0, 1},
                                      {"bfloat16", 0, 1},
                                      {"window", 0, kMaxSize},
                                      {"packed", 0, 1},
                                      {"softcap", 0, 1},
                                      {"dropout", 0, 1},
                                      {"bias", 0, 1},
                                      {"invariant", 0, 1},
                                      {"packable", 0, 1},
                                      {"alibi", 0, 1}};

  using Problem = AttentionProblem;
  using Choice = AttentionChoice;

  static Encoded encode_fields(const AttentionProblem& p) {
    return {p.load.heads,    p.seqlen_q,      p.seqlen_k,
            p.head_dim,      p.head_dim_v,    static_cast<int64_t>(p.math),
            p.load.group,    p.load.causal,   p.load.padded,
            p.load.bfloat16, p.load.window,   p.load.packed,
            p.load.softcap,  p.load.dropout,  p.load.bias,
            p.invariant,     p.load.packable, p.load.alibi};
  }
  static AttentionProblem decode_fields(const Encoded& x) {
    return {x[1],
            x[2],
            x[3],
            x[4],
            static_cast<AttentionMath>(x[5]),
            {x[0], x[6], x[7] != 0, x[8] != 0, x[9] != 0, x[10], x[11] != 0, x[12] != 0, x[13] != 0,
             x[14] != 0, x[16] != 0, x[17] != 0},
            {},
            x[15] != 0};
  }
  static Encoded shape_class(Encoded x) {
    for (int i : {0, 1, 2, 10}) x[i] = size_class(x[i]);
    return x;
  }

  static Encoded encode(const AttentionChoice& choice) {
    return {static_cast<int64_t>(choice.engine), choice.tile, choice.splits};
  }
  static AttentionChoice make(const AttentionProblem&, const Encoded& x) {
    return {static_cast<AttentionEngine>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2])};
  }
  static bool general(const Encoded& x) { return make({}, x).engine == AttentionEngine::kGeneral; }
  static bool decode(const Encoded& x) { return make({}, x).engine == AttentionEngine::kDecode; }
  static bool sm90(const Encoded& x) { return make({}, x).engine == AttentionEngine::kSm90; }
  static bool chain(const Encoded& x) { return make({}, x).engine == AttentionEngine::kChain; }
  static bool wide(const Encoded& x) { return make({}, x).engine == AttentionEngine::kWide; }

  static std::vector<Encoded> tiles_and_general(int tiles) {
    std::vector<Encoded> all;
    for (int i = 0; i < tiles; ++i) all.push_back(encode({AttentionEngine::kSync, i}));
    all.push_back(encode({AttentionEngine::kGeneral, 0}));
    return all;
  }

  static std::string math_text(AttentionMath math) {
    return math == AttentionMath::k16Bit ? "16 bits"
                                         : (math == AttentionMath::kTf32 ? "tf32" : "float32");
  }

  static std::string kernel(const AttentionProblem&, const Encoded& x) {
    return general(x)  ? "general"
           : decode(x) ? "tensor cores (mma.sync), the keys split over the GPU"
           : chain(x)  ? "tensor cores (mma.sync), the columns of the values split over the GPU"
           : sm90(x)   ? "tensor cores (wgmma)"
           : wide(x)   ? "tensor cores (wgmma), for head dims above 256"
                       : "tensor cores (mma.sync)";
  }
  static std::string wide_tile(int keys) {
    using Tile = AttentionWideTile;
    return tile_text(Tile::kRows, keys) + "x" + std::to_string(Tile::kDim) + " 2 blocks";
  }
  static std::string dims_text(const AttentionProblem& p) {
    return "head dims " + std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v);
  }
  static std::string why(const AttentionProblem& p, const Encoded& x) {
    if (general(x) && p.load.dropout) return "no tile supports this dropout";
    if (general(x) && p.load.bias) return "no tile supports this bias";
    if (general(x) && p.load.alibi) return "no tile supports this ALiBi";
    if (wide(x)) return "the only tile that holds " + dims_text(p);
    return (general(x) ? "no tile holds " : "the first tile that holds ") + dims_text(p);
  }
};

struct AttentionFamily : AttentionNumbers {
  static constexpr const char* kName = "attention";
  static constexpr const char* kEngines[] = {"sync", "general", "decode", "sm90", "chain", "wide"};
  static constexpr bool kFirstLegal = false;

  static AttentionChoice choose(const AttentionProblem& p) { return choose_attention(p); }
  static Refusal refusal(const AttentionProblem& p, const Encoded& x) {
    if (decode(x)) {
      return attention_decode_refusal(p, kAttentionDecodeTiles[x[1]], static_cast<int>(x[2]));
    }
    if (chain(x)) {
      const int tile = static_cast<int>(x[1]);
      // A remembered choice may come from a sequence of another length.
      if (x[2] != attention_chain_steps(p, tile)) return "the keys have another number of steps";
      return attention_chain_refusal(p, tile);
    }
    if (p.invariant) {
      const int tile = attention_invariant_tile(p);
      if (tile < 0 ? x != encode(choose_attention(p)) : !sm90(x)) return kAttentionOtherKeys;
      if (tile >= 0) {
        const AttentionSm90Tile& other = kAttentionSm90Tiles[x[1]];
        if (const Refusal reason = attention_invariant_refusal(p, other, tile)) return reason;
      }
    }
    if (sm90(x)) return attention_sm90_refusal(p, kAttentionSm90Tiles[x[1]]);
    if (wide(x)) return attention_wide_refusal(p, static_cast<int>(x[2]));
    return general(x) ? Refusal() : attention_refusal(p, kAttentionTiles[x[1]]);
  }
  static std::string why(const AttentionProblem& p, const Encoded& x) {
    if (decode(x)) return "few query rows, in the first tile that holds " + dims_text(p);
    if (chain(x)) return "few query rows, in the batch-invariant mode";
    if (!sm90(x)) return AttentionNumbers::why(p, x);
    return "the fastest tile, by estimate, of those that support " + dims_text(p);
  }
  // Lists all tiles. Each decode tile and the wide tile are listed several times: once with the
  // number of splits that fills the GPU, and once with each power of two as the number of splits.
  static std::vector<Encoded> candidates(const AttentionProblem& p) {
    std::vector<Encoded> all = tiles_and_general(kNumAttentionTiles);
    for (int i = 0; i < kNumAttentionSm90Tiles; ++i) {
      all.push_back(encode({AttentionEngine::kSm90, i}));
      if (attention_sm90_is_fastest(i)) {
        all.push_back(encode({AttentionEngine::kChain, i, attention_chain_steps(p, i)}));
      }
    }
    const auto add_splits = [&](AttentionEngine engine, int tile, int filling, int most) {
      all.push_back(encode({engine, tile, filling}));
      for (int splits = 1; splits <= most; splits *= 2) {
        if (splits != filling) all.push_back(encode({engine, tile, splits}));
      }
    };
    for (int i = 0; i < kNumAttentionDecodeTiles; ++i) {
      add_splits(AttentionEngine::kDecode, i, attention_decode_splits(p, kAttentionDecodeTiles[i]),
                 AttentionDecodeTile::kMaxSplits);
    }
    add_splits(AttentionEngine::kWide, 0, attention_wide_splits(p), AttentionWideTile::kMaxSplits);
    return all;
  }

  static std::string tile_dims_text(const AttentionSm90Tile& tile) {
    const std::string dim = std::to_string(tile.dim);
    return tile.dim_v == tile.dim ? dim : dim + " to " + std::to_string(tile.dim_v);
  }
  static std::string tile(const Encoded& x) {
    if (general(x)) return "";
    const std::string splits = x[2] > 1 ? " /" + std::to_string(x[2]) : "";
    if (wide(x)) return wide_tile(AttentionWideTile::kKeys) + splits;
    if (decode(x)) {
      const AttentionDecodeTile& tile = kAttentionDecodeTiles[x[1]];
      return tile_text(tile.keys, tile.dim) + " " + std::to_string(tile.warps) + " warps " +
             std::to_string(tile.stages) + " stages" + splits;
    }
    if (chain(x)) {
      const AttentionSm90Tile& tile = kAttentionSm90Tiles[x[1]];
      return tile_text(AttentionDecodeTile::kRows, tile.masked_keys()) + "x" +
             tile_dims_text(tile) + splits;
    }
    if (sm90(x)) {
      const AttentionSm90Tile& tile = kAttentionSm90Tiles[x[1]];
      return tile_text(tile.rows(), tile.keys) + "x" + tile_dims_text(tile);
    }
    const AttentionTile& tile = kAttentionTiles[x[1]];
    return math_text(tile.math) + " " + tile_text(tile.rows, tile.keys) + "x" +
           std::to_string(tile.dim);
  }
  // Returns the columns of the table that `tune` prints. The general kernel has no tile, so all its
  // columns except `splits` are 0.
  static Columns columns(const AttentionProblem&, const Encoded& x) {
    const auto row = [&](const auto& tile, int rows, int stages, int warps) -> Columns {
      return {{"rows", rows},
              {"keys", tile.keys},
              {"head_dim", tile.dim},
              {"stages", stages},
              {"warps", warps},
              {"splits", x[2]},
              {"tile_bytes", tile.tile_bytes()}};
    };
    if (decode(x)) {
      const AttentionDecodeTile& tile = kAttentionDecodeTiles[x[1]];
      return row(tile, AttentionDecodeTile::kRows, tile.stages, tile.warps);
    }
    if (wide(x)) {
      using Tile = AttentionWideTile;
      return {{"rows", Tile::kRows},           {"keys", Tile::kKeys},
              {"head_dim", Tile::kDim},        {"stages", Tile::kStages},
              {"warps", Tile::kThreads / 32},  {"splits", x[2]},
              {"tile_bytes", Tile::kTileBytes}};
    }
    if (sm90(x) || chain(x)) {
      const AttentionSm90Tile& tile = kAttentionSm90Tiles[x[1]];
      return chain(x) ? row(tile, AttentionDecodeTile::kRows, 1, 1)
                      : row(tile, tile.rows(), tile.stages, tile.threads() / 32);
    }
    const AttentionTile tile = general(x) ? AttentionTile{} : kAttentionTiles[x[1]];
    return row(tile, tile.rows, tile.stages, tile.warps);
  }
};

struct AttentionBackwardFamily : AttentionNumbers {
  static constexpr const char* kName = "attention_backward";
  // The backward has no decode tiles and no chains. "decode" and "chain" are in this list because
  // the indices of the engines must be the same as in the forward.
  static constexpr const char* kEngines[] = {"sync", "general", "decode", "sm90", "chain", "wide"};
  static constexpr bool kFirstLegal = true;

  static AttentionChoice choose(const AttentionProblem& p) { return choose_attention_backward(p); }
  static Refusal refusal(const AttentionProblem& p, const Encoded& x) {
    if (sm90(x)) return attention_backward_sm90_refusal(p, kAttentionBackwardSm90Tiles[x[1]]);
    if (wide(x)) return attention_backward_wide_refusal(p);
    return general(x) ? Refusal() : attention_backward_refusal(p, kAttentionBackwardTiles[x[1]]);
  }
  static std::vector<Encoded> candidates(const AttentionProblem&) {
    std::vector<Encoded> all;
    for (int i = 0; i < kNumAttentionBackwardSm90Tiles; ++i) {
      all.push_back(encode({AttentionEngine::kSm90, i}));
    }
    all.push_back(encode({AttentionEngine::kWide, 0}));
    for (const Encoded& choice : tiles_and_general(kNumAttentionBackwardTiles)) {
      all.push_back(choice);
    }
    return all;
  }

  static std::string tile(const Encoded& x) {
    if (general(x)) return "";
    if (wide(x)) return wide_tile(AttentionWideTile::kBackwardRows);
    if (sm90(x)) {
      const AttentionBackwardSm90Tile& tile = kAttentionBackwardSm90Tiles[x[1]];
      return tile_text(tile.keys, tile.rows) + "x" + std::to_string(tile.used) +
             (tile.dim_v == tile.dim ? "" : " to " + std::to_string(tile.dim_v)) +
             (tile.blocks > 1 ? " 2 blocks" : "");
    }
    const AttentionBackwardTile& tile = kAttentionBackwardTiles[x[1]];
    return math_text(tile.math) + " " + tile_text(tile.keys, tile.rows) + "x" +
           std::to_string(tile.head_dim) + (tile.paired ? " paired" : "");
  }
  // Returns the columns of the table that `tune` prints. The general kernels have no tile, so the
  // columns `keys` to `groups` are 0 for them.
  static Columns columns(const AttentionProblem&, const Encoded& x) {
    if (sm90(x)) {
      const AttentionBackwardSm90Tile& tile = kAttentionBackwardSm90Tiles[x[1]];
      return {{"keys", tile.keys},
              {"rows", tile.rows},
              {"cols", tile.rows},
              {"head_dim", tile.used},
              {"warps", tile.kThreads / 32},
              {"groups", 1},
              {"tile_bytes", tile.tile_bytes()}};
    }
    if (wide(x)) {
      using Tile = AttentionWideTile;
      return {{"keys", Tile::kRows},           {"rows", Tile::kBackwardRows},
              {"cols", Tile::kBackwardRows},   {"head_dim", Tile::kDim},
              {"warps", Tile::kThreads / 32},  {"groups", 1},
              {"tile_bytes", Tile::kTileBytes}};
    }
    const AttentionBackwardTile tile =
        general(x) ? AttentionBackwardTile{} : kAttentionBackwardTiles[x[1]];
    return {{"keys", tile.keys},
            {"rows", tile.rows},
            {"cols", tile.cols},
            {"head_dim", tile.head_dim},
            {"warps", tile.warps},
            {"groups", tile.groups},
            {"tile_bytes", tile.shared_bytes()}};
  }
};

}  // namespace torchweld
