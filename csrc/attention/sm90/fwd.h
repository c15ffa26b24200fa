// attention's forward on Hopper's tensor cores: what the host hands to the kernel.
#pragma once

#include <algorithm>

#include "attention/fwd.h"
#include "attention/sm90/tensor_map.h"
#include "core/fast_divide.h"

namespace torchweld {

// The order of AttentionSchedule for tiles that are counted in 32 bits.
struct AttentionSm90Order {
  uint32_t blocks, section, heads;
  FastDivisor tiles, of_section, width, last_width;  // heads of a section, and of the last one
  FastDivisor nheads, group;

  AttentionSm90Order(const AttentionParams& p, int rows)
      : AttentionSm90Order(p, AttentionSchedule(p, rows, 2)) {}

 private:
  AttentionSm90Order(const AttentionParams& p, const AttentionSchedule& schedule)
      : AttentionSm90Order(p, schedule, p.sizes.batch * p.sizes.nheads) {}
  AttentionSm90Order(const AttentionParams& p, const AttentionSchedule& schedule, int64_t heads)
      : blocks(static_cast<uint32_t>(schedule.blocks(p))),
        section(static_cast<uint32_t>(std::min(schedule.section, heads))),
        heads(static_cast<uint32_t>(heads)),
        tiles(schedule.tiles),
        of_section(section * schedule.tiles),
        width(section),
        last_width(heads % section == 0 ? section : heads % section),
        nheads(p.sizes.nheads),
        group(p.sizes.nheads / p.sizes.nheads_kv) {}
};

// Exponents of small capped scores, whose probabilities need no maximum.
struct AttentionSmallScores {
  bool given;  // else such ones could leave the range of bfloat16, or the terms that of fp32
  SmallExponent<3> short_one;
  SmallExponent<4> long_one;

  explicit AttentionSmallScores(const CappedScale& scale)
      : given(scale.softcap > 0.f && scale.c <= 80.f && scale.cap >= 1e-4f && scale.cap <= 1e4f),
        short_one(scale.c, scale.cap),
        long_one(scale.c, scale.cap) {}
  explicit AttentionSmallScores(const ScoreScale&)
      : given(false), short_one(0, 1), long_one(0, 1) {}
};

template <bool kMasked>
struct AttentionSm90Params {
  TensorMap query, key, value;
  typename AttentionVariant<kMasked>::Params attention;
  typename AttentionVariant<kMasked>::Scale scale;
  AttentionSm90Order order;
  AttentionSmallScores small{scale};
};

// One file for every few tiles (csrc/instantiations.py).
template <typename T, int kTile>
void launch_attention_sm90_tile(const AttentionParams& params, cudaStream_t stream);
template <typename T, int kTile>
void launch_attention_sm90_tile(const MaskedAttentionParams& params, cudaStream_t stream);

}  // namespace torchweld
