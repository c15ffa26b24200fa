// outer_mul_relu and its gradient, a cell of the matrix at a time, for host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

struct OuterMulReluCell {
  static constexpr int kReads = 0;
  static constexpr bool kRowValues = true, kColumnValues = true, kWrites = true;
  static constexpr bool kRowSums = false, kColumnSums = false;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.x * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// in: dz
struct OuterMulReluBackwardCell {
  static constexpr int kReads = 1;
  static constexpr bool kRowValues = true, kColumnValues = true, kWrites = false;
  static constexpr bool kRowSums = true, kColumnSums = true;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.x * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.to_row = dproduct * cell.x;  // 0 * inf is NaN, as in torch
    cell.to_column = dproduct * cell.y;
  }
};

}  // namespace torchweld
