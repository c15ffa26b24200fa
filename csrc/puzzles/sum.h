// CPU: sums over a dim of a matrix.
#pragma once

#include "core/check.h"

namespace torchweld {

// to = the sum of x (rows, n) over `dim`, rounded once for any number of threads. dim 0: to (n,).
// dim 1: to (rows,). An empty sum is 0.
void sum_into(const Tensor& to, const Tensor& x, int64_t dim);

}  // namespace torchweld
