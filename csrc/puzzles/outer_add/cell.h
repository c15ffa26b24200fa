// outer_add and its backward for one cell of the matrix, on host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

struct OuterAddCell : MatrixPass<0, pass::row_values | pass::column_values | pass::writes> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.out = cell.x + cell.y;
  }
};

// in[0] is dz.
struct OuterAddBackwardCell : MatrixPass<1, pass::row_sums | pass::column_sums> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.to_row = cell.in[0];
    cell.to_column = cell.in[0];
  }
};

}  // namespace torchweld
