// outer_mul_relu and its backward for one cell of the matrix, on host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

struct OuterMulReluCell : MatrixPass<0, pass::row_values | pass::column_values | pass::writes> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.x * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// in[0] is dz.
struct OuterMulReluBackwardCell
    : MatrixPass<1, pass::row_values | pass::column_values | pass::row_sums | pass::column_sums> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.x * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.to_row = dproduct * cell.x;  // 0 * inf is NaN, as in torch
    cell.to_column = dproduct * cell.y;
  }
};

}  // namespace torchweld
