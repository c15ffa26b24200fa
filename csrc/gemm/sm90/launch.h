// The launcher of the matmul on wgmma and TMA. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld {

// Returns the kernel parameters of a product for which a tile of this engine was chosen. If an
// operand needs rewriting (sm90_writes), launches the kernel that rewrites it.
Sm90Params sm90_params(const GemmParams& params, cudaStream_t stream);

void launch_sm90_gemm(const GemmParams& params, cudaStream_t stream);

// K-major copies of fp32 operands. For TF32, the copy of an operand is one fp32 matrix. For exact
// fp32, the copy is three bf16 matrices, whose sum is the operand. In a gated product, each of
// these matrices of b is stored as two matrices: the left half, then the right half. The matrices
// of an operand follow one another at distance half_stride.
struct Sm90Written {
  GemmOperand a, b;
};

// Writes copies of the operands to params.written. Copies only the operands for which sm90_writes
// is true. There must be at least one such operand.
Sm90Written write_sm90_operands(const GemmParams& params, cudaStream_t stream);

// Launches the kernel for one tile and one GemmMath. csrc/instantiations.py lists the
// instantiations.
template <GemmMath kMath, int kTile>
void launch_sm90_tile(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
