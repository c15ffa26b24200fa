// The arguments that the host passes to the kernel of attention's forward on Hopper.
#pragma once

#include <algorithm>

#include "attention/fwd.h"
#include "attention/sm90/tensor_map.h"
#include "core/fast_divide.h"

namespace torchweld {

// AttentionSchedule with 32-bit values, and with divisors that the host computes.
struct AttentionSm90Schedule {
  // The number of work tiles, the number of heads per section, and the number of all heads.
  uint32_t blocks, section, heads;
  FastDivisor tiles, section_tiles, section_heads, last_section_heads;
  FastDivisor nheads, group;

  AttentionSm90Schedule(const AttentionParams& p, int rows)
      : AttentionSm90Schedule(p, AttentionSchedule(p, rows, 2)) {}

 private:
  AttentionSm90Schedule(const AttentionParams& p, const AttentionSchedule& schedule)
      : AttentionSm90Schedule(p, schedule, p.sizes.batch * p.sizes.nheads) {}
  AttentionSm90Schedule(const AttentionParams& p, const AttentionSchedule& schedule, int64_t heads)
      : blocks(static_cast<uint32_t>(schedule.blocks(p))),
        section(static_cast<uint32_t>(std::min(schedule.section, heads))),
        heads(static_cast<uint32_t>(heads)),
        tiles(schedule.tiles),
        section_tiles(section * schedule.tiles),
        section_heads(section),
        last_section_heads(heads % section == 0 ? section : heads % section),
        nheads(p.sizes.nheads),
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

template <bool kMasked>
struct AttentionSm90Params {
  TensorMap query, key, value;
  AttentionParams attention;
  typename AttentionVariant<kMasked>::Scale scale;
  AttentionSm90Schedule schedule;
  AttentionSmallScores small{scale};
};

// csrc/instantiations.py generates the files that instantiate this template. Each file has a few
// tiles.
template <typename T, int kTile, bool kMasked>
void launch_attention_sm90_tile(const AttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
