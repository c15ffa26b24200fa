// What attention, causal_softmax and softmax_matmul know beside leftpad and causal, for host and
// device.
#pragma once

#include "attention/mask.h"

namespace torchweld {

// What a mask has beside leftpad and causal, and what becomes of the scores, as kernels take it.
// Null and 0: not given.
struct AttentionMask {
  const int32_t* key_start;  // (batch, seqlen_q)
  const int32_t* key_end;    // (batch,)
  int64_t window;
  float softcap;      // scores become softcap * tanh(score / softcap)
  const float* sink;  // (nheads,): one more logit of a head, without a value

  bool given() const { return key_start || key_end || window > 0 || softcap > 0.f || sink; }

  // The rule with the window, from the one without.
  TW_HOST_DEVICE MaskRule rule(MaskRule rule) const {
    rule.window = window;
    return rule;
  }
  TW_HOST_DEVICE SequenceMask sequence(const MaskRule& rule, const int32_t* leftpad,
                                       int64_t b) const {
    return {leftpad ? rule.clamp_pad(leftpad[b]) : 0,
            key_end ? rule.clamp_pad(key_end[b]) : rule.seqlen_k,
            key_start ? key_start + b * rule.seqlen_q : nullptr};
  }
};

}  // namespace torchweld
