// The kernel parameters of sums over the last dim.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "puzzles/row_sum/config.h"

namespace torchweld {

struct RowSumParams {
  const void* x;  // (rows, n); rows are row_stride elements apart
  void* y;        // (rows,)
  int64_t rows;
  int64_t n;
  int64_t row_stride;
  DType dtype;
  RowSumChoice choice;
  float* partials;     // (rows, splits), nullptr without splits
  unsigned* counters;  // (rows,), zero before and after the launch; nullptr without splits
};

// Launches the sums of all rows. All sizes must be at least 1.
void launch_row_sum(const RowSumParams& params, cudaStream_t stream);

}  // namespace torchweld
