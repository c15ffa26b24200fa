// The types and the shared memory of a block of attention's backward.
#pragma once

#include <type_traits>

#include "attention/bwd_work_tile.cuh"
#include "attention/sync/bwd_fp32.cuh"

namespace torchweld {

// The gradients that a launch computes. kBoth: dV, dK and dQ. kValue: only dV. kKey: dK and dQ.
enum class BackwardPart { kBoth, kValue, kKey };

template <typename T_, int kTile, BackwardPart kPart, bool kMasked_>
struct BackwardConfig {
  using T = T_;
  static constexpr bool kMasked = kMasked_;
  using Args = std::conditional_t<kMasked, MaskedBackwardArgs, BackwardArgs>;
  using WorkTile = BackwardWorkTile<std::conditional_t<kMasked, KeyRange32, SequenceSpan>>;
  static constexpr AttentionBackwardTile kShape = kAttentionBackwardTiles[kTile];
  static constexpr bool kSplit = kShape.math == AttentionMath::kFloat32;
  static constexpr int kHeadDim = kShape.head_dim;
  static constexpr int kKeys = kShape.keys;
  static constexpr int kRows = kShape.rows;
  static constexpr int kCols = kShape.cols;
  static constexpr int kWarps = kShape.warps;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kStrips = kShape.strips();
  static constexpr int kGroups = kShape.groups;
  static constexpr bool kPaired = kShape.paired;
  static constexpr int kStripWarps = kShape.strip_warps();
  static constexpr bool kValue = kPart != BackwardPart::kKey;
  static constexpr bool kKey = kPart != BackwardPart::kValue;
  // The unroll factors of the loops over the head dim. Larger factors would spill registers.
  static constexpr int kUnroll = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kSlabUnroll = kSplit || (sizeof(T) == 4 && kWarps == 2) ? 1 : 4;
  using Ops =
      std::conditional_t<kSplit, SplitOperands<kShape.sum_registers() <= 64 ? 2 : 1>, Operands<T>>;
  template <int kTileRows, int kTileCols>
  using Tile = std::conditional_t<kSplit, SplitTile<kTileRows, kTileCols>,
                                  SharedTile<T, kTileRows, kTileCols>>;
  using KeyTile = Tile<kKeys, kHeadDim>;
  using QueryTileOf = Tile<kRows, kHeadDim>;
  using ScoreTile = Tile<kKeys, kRows>;
  using RawTile = SharedTile<T, kRows, kHeadDim>;
  static_assert(kShape.valid() && elem_size(kShape.math) == sizeof(T));
};

template <typename Config, bool kSplit = Config::kSplit>
struct BackwardShared {
  typename Config::KeyTile k, v;
  typename Config::QueryTileOf q[2], dout[2];
  // If kPaired is true, the third buffer holds P. The value warps write P, and the key warps read
  // P.
  typename Config::ScoreTile ds[Config::kPaired ? 3 : 2];
  float lse[2][Config::kRows];
  float delta[2][Config::kRows];
  typename Config::WorkTile work;
};

// The shared memory in fp32. q and dout hold the bf16 terms of the current Q and dO. The next Q and
// dO arrive in separate fp32 buffers.
template <typename Config>
struct BackwardShared<Config, true> {
  typename Config::KeyTile k, v;
  typename Config::QueryTileOf q[1], dout[1];
  typename Config::ScoreTile ds[1];
  typename Config::RawTile next_q, next_dout;
  float lse[2][Config::kRows];
  float delta[2][Config::kRows];
  typename Config::WorkTile work;
};

}  // namespace torchweld
