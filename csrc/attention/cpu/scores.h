// CPU. What becomes of scores in attention, softmax_matmul and causal_softmax, and the sinks beside
// them.
#pragma once

#include <limits>

#include "attention/mask_arguments.h"
#include "core/simd_cpu.h"

namespace torchweld {

struct CpuScores {
  double scale;
  double softcap;  // 0: none
  Tensor sinks;    // (nheads,) in the statistics' dtype, or undefined

  CpuScores(const MaskArguments& args, double scale, at::ScalarType acc)
      : scale(scale), softcap(args.softcap.value_or(0)) {
    if (is_given(args.sink)) sinks = args.sink->to(acc).contiguous();
  }

  template <typename acc_t>
  acc_t sink(int64_t h) const {
    return sinks.defined() ? sinks.const_data_ptr<acc_t>()[h]
                           : -std::numeric_limits<acc_t>::infinity();
  }
};

// scores = softcap * tanh(scores / softcap). cap_tile enters vectors by itself.
template <typename acc_t>
inline void cap_row(acc_t* scores, int64_t count, acc_t softcap) {
  const acc_t inverse = 1 / softcap;
  for (int64_t i = 0; i < count; ++i) scores[i] = softcap * tanh_in_vectors(scores[i] * inverse);
}
template <typename acc_t>
void cap_tile(acc_t* scores, int64_t count, double softcap) {
  with_vectors([&] { cap_row(scores, count, static_cast<acc_t>(softcap)); });
}

}  // namespace torchweld
