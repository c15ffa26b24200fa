// The tensors of a pass over a matrix, on whatever device.
#pragma once

#include "core/check.h"

namespace torchweld {

// Undefined where the op has none.
struct MatrixPassTensors {
  Tensor in[2];        // (rows, n)
  Tensor x;            // (n,)
  Tensor y;            // (rows,)
  Tensor out;          // (rows, n), contiguous
  Tensor row_sums;     // (rows,)
  Tensor column_sums;  // (n,)
};

}  // namespace torchweld
