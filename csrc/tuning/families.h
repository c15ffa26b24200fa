// Every family of kernels that tune knows. Pure host code.
//
// scalar_attention and the matrix passes are not among them: they choose once for the size of the
// scratch and once for the launch, and another thread may remember a choice in between.
#pragma once

#include <string_view>

#include "attention/family.h"
#include "gemm/family.h"
#include "int4/family.h"
#include "puzzles/conv2d/family.h"
#include "puzzles/row_sum/family.h"
#include "softmax/family.h"

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

using Families = FamilyList<GemmFamily, SoftmaxFamily, AttentionFamily, AttentionBackwardFamily,
                            Int4Family, RowSumFamily, Conv2dFamily>;

}  // namespace torchweld
