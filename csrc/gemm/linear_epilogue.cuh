// The epilogue of a linear layer, a functor on a fragment of the result: it adds the bias, stores
// the pre-activation, applies the activation or the gate, and stores y.
//
// A fragment holds the values of one thread and knows where they lie in y. Boxes
// (sm90/epilogue.cuh) and swap_ab tiles (sm90/swap_ab_epilogue.cuh) have fragments of their own. A
// fragment F has these members:
//   F::kGated, F::kActivates   whether there is a gate, and whether there may be an activation
//   values                     the values; in a gated product the left values
//   partner                    in a gated product: the right values of the same elements of y
//   stores_preact(), add_bias(), store_preact(), store()
//   pair_up()                  makes `partner` complete; returns false if another thread has the
//                              left values, gates them and stores the result
#pragma once

#include "device/activation.cuh"
#include "gemm/gemm.h"

namespace torchweld {

template <bool kExact, class F>
__device__ __forceinline__ void linear_epilogue(const GemmEpilogue& e, F&& f) {
  using Fragment = std::decay_t<F>;
  if (e.bias != nullptr) f.add_bias();
  if (f.stores_preact()) f.store_preact();
  if constexpr (Fragment::kGated) {
    if (!f.pair_up()) return;
    apply_gate<kExact>(f.values, f.partner, e.gate);
  } else if constexpr (Fragment::kActivates) {
    activate<kExact>(f.values, e.activation);
  }
  f.store();
}

}  // namespace torchweld
