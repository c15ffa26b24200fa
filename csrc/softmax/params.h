// The kernel parameters of softmax over the last dim.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "core/dtype.h"

namespace torchweld {

struct SoftmaxParams {
  const void* x;  // (rows, n); rows are x_row_stride elements apart
  void* y;        // (rows, n), contiguous
  int64_t rows;
  int64_t n;
  int64_t x_row_stride;
  DType dtype;
};

struct SoftmaxBackwardParams {
  const void* dy;  // (rows, n)
  const void* y;   // (rows, n)
  void* dx;        // (rows, n), contiguous
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t y_row_stride;
  DType dtype;
};

// A function that returns the address of a counter. The counter must be 0 before a ring kernel
// runs, and the kernel leaves it at 0. Only launches of ring kernels call the function.
using ZeroCounter = std::function<unsigned*()>;

void launch_softmax(const SoftmaxParams& params, const ZeroCounter& counter, cudaStream_t stream);
void launch_softmax_backward(const SoftmaxBackwardParams& params, const ZeroCounter& counter,
                             cudaStream_t stream);

}  // namespace torchweld
