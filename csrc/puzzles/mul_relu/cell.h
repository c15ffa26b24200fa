// mul_relu and its backward for one cell of the matrix, on host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

// in[0] is x.
struct MulReluCell : MatrixPass<1, pass::row_values | pass::writes> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.in[0] * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// The backward of a cell. in[0] is dz, and in[1] is x.
struct MulReluBackwardCell : MatrixPass<2, pass::row_values | pass::writes | pass::row_sums> {
  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.in[1] * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.out = dproduct * cell.y;  // 0 * inf is NaN, as in torch
    cell.to_row = dproduct * cell.in[1];
  }
};

}  // namespace torchweld
