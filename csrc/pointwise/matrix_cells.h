// The ops that are passes over a matrix, each for one cell, on host and device.
#pragma once

#include "pointwise/matrix_pass.h"

namespace torchweld {

// in[0] is x.
struct AddScalarCell : MatrixPass<1, pass::writes> {
  static constexpr const char* kName = "add_scalar";
  float value;

  explicit AddScalarCell(double value) : value(static_cast<float>(value)) {}

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.out = cell.in[0] + value;
  }
};

struct OuterAddCell : MatrixPass<0, pass::row_values | pass::column_values | pass::writes> {
  static constexpr const char* kName = "outer_add";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.out = cell.x + cell.y;
  }
};

// in[0] is dz.
struct OuterAddBackwardCell : MatrixPass<1, pass::row_sums | pass::column_sums> {
  static constexpr const char* kName = "outer_add_backward";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    cell.to_row = cell.in[0];
    cell.to_column = cell.in[0];
  }
};

struct OuterMulReluCell : MatrixPass<0, pass::row_values | pass::column_values | pass::writes> {
  static constexpr const char* kName = "outer_mul_relu";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.x * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// in[0] is dz.
struct OuterMulReluBackwardCell
    : MatrixPass<1, pass::row_values | pass::column_values | pass::row_sums | pass::column_sums> {
  static constexpr const char* kName = "outer_mul_relu_backward";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.x * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.to_row = dproduct * cell.x;  // 0 * inf is NaN, as in torch
    cell.to_column = dproduct * cell.y;
  }
};

// in[0] is x.
struct MulReluCell : MatrixPass<1, pass::row_values | pass::writes> {
  static constexpr const char* kName = "mul_relu";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F product = cell.in[0] * cell.y;
    cell.out = product < F(0) ? F(0) : product;  // NaN stays NaN
  }
};

// in[0] is dz, and in[1] is x.
struct MulReluBackwardCell : MatrixPass<2, pass::row_values | pass::writes | pass::row_sums> {
  static constexpr const char* kName = "mul_relu_backward";

  template <typename F>
  TW_HOST_DEVICE void operator()(Cell<F>& cell) const {
    const F dproduct = cell.in[1] * cell.y <= F(0) ? F(0) : cell.in[0];
    cell.out = dproduct * cell.y;  // 0 * inf is NaN, as in torch
    cell.to_row = dproduct * cell.in[1];
  }
};

}  // namespace torchweld
