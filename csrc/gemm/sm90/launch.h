// The launcher of the matmul on wgmma and TMA. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld {

// Returns the kernel parameters of a product for which a tile of this engine was chosen. If an
// operand needs rewriting (sm90_writes), launches the kernel that rewrites it.
Sm90Params sm90_params(const GemmParams& params, cudaStream_t stream);

void launch_sm90_gemm(const GemmParams& params, cudaStream_t stream);

// K-major copies of fp32 operands. For exact fp32 a copy is three bf16 matrices that add up to the
// values, for TF32 it is one fp32 matrix. In a gated product, each of these matrices of b is stored
// as two: first the left half, then the right half. All matrices of an operand lie half_stride
// apart.
struct Sm90Written {
  GemmOperand a, b;
};

// Writes the operands for which sm90_writes is true to params.written. At least one operand must
// need it.
Sm90Written write_sm90_operands(const GemmParams& params, cudaStream_t stream);

// Launches a kernel of one tile and dtype. csrc/instantiations.py lists the instantiations.
template <GemmMath kMath, int kTile>
void launch_sm90_tile(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
