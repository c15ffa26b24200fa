// The kernel families for which torchweld.tune can choose configurations. This is pure host code.
//
// scalar_attention and the matrix passes are not families. They choose a configuration twice: for
// the size of the scratch memory and for the launch. If they were families, another thread could
// change the remembered choice between these two times.
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
  // Calls body(KernelFamily{}) for the family called `name`. Returns false if there is no such
  // family.
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
