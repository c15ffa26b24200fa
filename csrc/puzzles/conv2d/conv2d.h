// The kernel parameters of single-channel convolutions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "puzzles/conv2d/config.h"

namespace torchweld {

// The kernels compute z[b, i, j] = sum_pq weight[p, q] * x[b, i + p, j + q]. x is 0 behind the
// bottom and the right edge. If `flipped` is true, they compute the gradient with respect to x.
// Then `x` holds dz, z holds dx, and z[b, i, j] = sum_pq weight[p, q] * x[b, i - p, j - q]. In this
// formula x is 0 before the top and the left edge.
struct Conv2dParams {
  const void* x;       // (batch, height, width), stride 1 along the width
  const void* weight;  // (kernel_height, kernel_width), contiguous
  void* z;             // (batch, height, width), contiguous
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t x_batch_stride;
  int64_t x_row_stride;
  bool flipped;
  DType dtype;

  // Whether x and z are contiguous and all their rows start and end on 16-byte boundaries.
  bool contiguous() const {
    const int64_t row_bytes = width * (dtype == DType::kFloat32 ? 4 : 2);
    const auto aligned = [](const void* g) { return reinterpret_cast<uintptr_t>(g) % 16 == 0; };
    return aligned(x) && aligned(z) && row_bytes % 16 == 0 &&
           (height == 1 || x_row_stride == width) &&
           (batch == 1 || x_batch_stride == height * width);
  }
};

// The kernels compute dweight[p, q] = sum_bij dz[b, i, j] * x[b, i + p, j + q].
struct Conv2dWeightParams {
  const void* dz;   // (batch, height, width), stride 1 along the width
  const void* x;    // (batch, height, width), stride 1 along the width
  void* dweight;    // (kernel_height, kernel_width), contiguous
  float* partials;  // split.partials() floats
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t dz_batch_stride;
  int64_t dz_row_stride;
  int64_t x_batch_stride;
  int64_t x_row_stride;
  Conv2dWeightSplit split;
  DType dtype;
};

// Launch functions of the kernels. All sizes must be at least 1.
void launch_conv2d(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_direct(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_small(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_cells_float16(int tile, const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_cells_bfloat16(int tile, const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_general(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_dweight(const Conv2dWeightParams& params, cudaStream_t stream);

}  // namespace torchweld
