// The tensors of a pass over a matrix, on any device.
#pragma once

#include "core/check.h"

namespace torchweld {

// A tensor that the op does not use is undefined.
struct MatrixPassTensors {
  Tensor in[2];             // (rows, n)
  Tensor x;                 // (n,)
  Tensor y;                 // (rows,)
  Tensor out;               // (rows, n), contiguous
  Tensor row_sums = {};     // (rows,)
  Tensor column_sums = {};  // (n,)
};

}  // namespace torchweld
