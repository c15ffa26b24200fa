// outer_add and its gradient, a cell of the matrix at a time, for host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

struct OuterAddCell {
  static constexpr int kReads = 0;
  static constexpr bool kRowValues = true, kColumnValues = true, kWrites = true;
  static constexpr bool kRowSums = false, kColumnSums = false;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.out = cell.x + cell.y;
  }
};

// in: dz
struct OuterAddBackwardCell {
  static constexpr int kReads = 1;
  static constexpr bool kRowValues = false, kColumnValues = false, kWrites = false;
  static constexpr bool kRowSums = true, kColumnSums = true;

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.to_row = cell.in[0];
    cell.to_column = cell.in[0];
  }
};

}  // namespace torchweld
