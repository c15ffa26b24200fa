// CPU: sums over a dim of a matrix.
#pragma once

#include "core/check.h"

namespace torchweld {

// Computes `to` = the sum of x (rows, n) over `dim`. The sum is rounded once, with any number of
// threads. `to` is (n,) for dim 0 and (rows,) for dim 1. An empty sum is 0.
void sum_into(const Tensor& to, const Tensor& x, int64_t dim);

}  // namespace torchweld
