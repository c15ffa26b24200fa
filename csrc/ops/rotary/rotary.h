// Parameters and launcher of the rotary kernel. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// A tensor (batch, nheads, seqlen, head_dim) and where its rotated values go. Strides are those of
// batch, head and position, in elements; the last stride is 1. nheads is 0 for an absent tensor.
struct RotaryTensor {
  const void* from;
  void* to;
  int64_t nheads;
  int64_t from_strides[3];
  int64_t to_strides[3];
};

// cos or sin (batch, seqlen, rotary_dim), with the strides of batch and position.
struct RotaryTable {
  const void* data;
  int64_t strides[2];
};

struct RotaryParams {
  RotaryTensor tensors[2];  // q and k
  RotaryTable cos, sin;
  int64_t batch, seqlen;
  int head_dim, rotary_dim;
  bool interleaved;
  bool transposed;  // multiplies by the transposed rotation: the gradient
  DType dtype, table_dtype;
};

// batch and seqlen are at least 1.
void launch_rotary(const RotaryParams& params, cudaStream_t stream);

}  // namespace torchweld
