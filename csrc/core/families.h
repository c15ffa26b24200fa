// Every family of kernels that tune knows. Pure host code.
//
// scalar_attention and the matrix passes are not among them: they choose once for the size of the
// scratch and once for the launch, and another thread may remember a choice in between.
#pragma once

#include <string_view>

#include "gemm/gemm_tuning.h"
#include "ops/attention/attention_tuning.h"
#include "ops/conv2d/conv2d_tuning.h"
#include "ops/int4_linear/int4_linear_tuning.h"
#include "ops/row_sum/row_sum_tuning.h"
#include "ops/softmax/softmax_tuning.h"

namespace torchweld {

template <typename... Family>
struct FamilyList {
  // Calls body(Family{}) of the family of that name; false where there is none.
  template <typename Body>
  static bool visit(std::string_view name, const Body& body) {
    return ((name == Family::kName && (body(Family{}), true)) || ...);
  }
  template <typename Body>
  static void each(const Body& body) {
    (body(Family{}), ...);
  }
};

using Families = FamilyList<GemmTuning, SoftmaxTuning, AttentionTuning, AttentionBackwardTuning,
                            Int4Tuning, RowSumTuning, Conv2dTuning>;

}  // namespace torchweld
