// The parameters and the launcher of the rotary kernel. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// A tensor (batch, nheads, seqlen, head_dim) to rotate, and the memory of its result. from_strides
// and to_strides are the strides of the batch, head and position dims, in elements. The stride of
// the last dimension is 1. If the tensor is absent, nheads is 0.
struct RotaryTensor {
  const void* from;
  void* to;
  int64_t nheads;
  int64_t from_strides[3];
  int64_t to_strides[3];
};

// One of the two tables, cos or sin: (batch, seqlen, rotary_dim). The strides belong to the batch
// and position dims, in elements.
struct RotaryTable {
  const void* data;
  int64_t strides[2];
};

struct RotaryParams {
  RotaryTensor tensors[2];  // the tensors q and k
  RotaryTable cos, sin;
  int64_t batch, seqlen;
  int head_dim, rotary_dim;
  bool interleaved;
  bool transposed;  // true for the gradient, which multiplies by the transposed rotation
  DType dtype, table_dtype;
};

// Launches the kernel. batch and seqlen must be at least 1.
void launch_rotary(const RotaryParams& params, cudaStream_t stream);

}  // namespace torchweld
