// The families of kernels that tune knows. Pure host code.
//
// scalar_attention and the matrix passes are no families: they choose twice, for the size of the
// scratch and for the launch, and another thread could remember a choice in between.
#pragma once

#include <string_view>

#include "attention/family.h"
#include "gemm/family.h"
#include "int4/family.h"
#include "puzzles/conv2d/family.h"
#include "puzzles/row_sum/family.h"
#include "softmax/family.h"

namespace torchweld {

template <typename... KernelFamily>
struct FamilyList {
  // Calls body(KernelFamily{}) for the family called `name`; returns false if there is none.
  template <typename Body>
  static bool visit(std::string_view name, const Body& body) {
    return ((name == KernelFamily::kName && (body(KernelFamily{}), true)) || ...);
  }
  template <typename Body>
  static void each(const Body& body) {
    (body(KernelFamily{}), ...);
  }
};

using Families = FamilyList<GemmFamily, SoftmaxFamily, AttentionFamily, AttentionBackwardFamily,
                            Int4Family, RowSumFamily, Conv2dFamily>;

}  // namespace torchweld
