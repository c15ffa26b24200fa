// The arguments that the host passes to the kernel of attention's forward on Hopper.
#pragma once

#include "attention/fwd.h"
#include "attention/sm90/tensor_map.h"
#include "attention/tile_order.cuh"

namespace torchweld {

// The work tiles, and the number of query heads that share a kv head. If the sequences share a
// bias, the order counts the sequences of a head where it otherwise counts the heads of a sequence.
struct AttentionSm90Schedule {
  uint32_t blocks;  // the number of work tiles
  AttentionTileOrder order;
  FastDivisor group;

  AttentionSm90Schedule(const AttentionParams& p, int rows)
      : AttentionSm90Schedule(p, AttentionSchedule(p, rows, 2)) {}

 private:
  AttentionSm90Schedule(const AttentionParams& p, const AttentionSchedule& schedule)
      : blocks(static_cast<uint32_t>(schedule.blocks(p))),
        order(schedule.tiles, p.sizes.batch * p.sizes.nheads,
              p.mask.bias.is_shared() ? p.sizes.batch : p.sizes.nheads, schedule.section),
        group(p.sizes.nheads / p.sizes.nheads_kv) {}
};

// Polynomials that convert small soft-capped scores into exponents. The softmax of such scores does
// not subtract the maximum.
struct AttentionSmallScores {
  // NOTE: `enabled` is false if probabilities could leave the range of bfloat16, or if the
  // coefficients of three_terms could leave the range of fp32.
  bool enabled;
  SmallExponent<3> three_terms;
  SmallExponent<6> six_terms;

  explicit AttentionSmallScores(const CappedScale& scale)
      : enabled(scale.softcap > 0.f && scale.c <= 80.f && scale.cap >= 1e-4f && scale.cap <= 1e4f),
        three_terms(scale.c, scale.cap),
        six_terms(scale.c, scale.cap) {}
  explicit AttentionSmallScores(const ScoreScale&)
      : enabled(false), three_terms(0, 1), six_terms(0, 1) {}
};

// The tensor map of the bias, which only the kernels for a bias have.
template <bool kBias>
struct AttentionBiasMap {};
template <>
struct AttentionBiasMap<true> {
  TensorMap map;
};

template <bool kMasked, bool kBias = false>
struct AttentionSm90Params {
  TensorMap query, key, value;
  AttentionParams attention;
  typename AttentionVariant<kMasked>::Scale scale;
  AttentionSm90Schedule schedule;
  AttentionSmallScores small{scale};
  AttentionBiasMap<kBias> of_bias{};
};

// csrc/instantiations.py generates the files that instantiate this template. Each file has a few
// tiles.
template <typename T, int kTile, bool kMasked>
void launch_attention_sm90_tile(const AttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
