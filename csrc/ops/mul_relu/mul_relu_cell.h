// mul_relu and its gradient, a cell of the matrix at a time, for host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

// in: x
struct MulReluCell {
  static constexpr int kReads = 1;
  static constexpr bool kRowValues = true, kColumnValues = false, kWrites = true;
  static constexpr bool kRowSums = false, kColumnSums = false;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.in[0] * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// in: dz, x
struct MulReluBackwardCell {
  static constexpr int kReads = 2;
  static constexpr bool kRowValues = true, kColumnValues = false, kWrites = true;
  static constexpr bool kRowSums = true, kColumnSums = false;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.in[1] * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.out = dproduct * cell.y;  // 0 * inf is NaN, as in torch
    cell.to_row = dproduct * cell.in[1];
  }
};

}  // namespace torchweld
