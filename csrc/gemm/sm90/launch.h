// The launcher of the matmul on wgmma and TMA. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld::sm90 {

// Returns the kernel parameters of a product for which a tile of this engine was chosen. If an
// operand needs rewriting (writes_operand), launches the kernel that rewrites it.
KernelParams kernel_params(const GemmParams& params, cudaStream_t stream);

void launch_gemm_tile(const GemmParams& params, cudaStream_t stream);

// K-major copies of fp32 operands. For TF32, the copy of an operand is one fp32 matrix. For exact
// fp32, the copy is three bf16 matrices, whose sum is the operand. In a gated product, each of
// these matrices of b is stored as two matrices: the left half, then the right half. The matrices
// of an operand follow one another at distance half_stride.
struct WrittenOperands {
  GemmOperand a, b;
};

// Returns the number of bytes of scratch memory that write_operands needs. Returns 0 if the engine
// reads both operands in place.
int64_t written_bytes(const GemmParams& params);

// Writes copies of the operands to params.written. Copies only the operands for which
// writes_operand is true. There must be at least one such operand.
WrittenOperands write_operands(const GemmParams& params, cudaStream_t stream);

// Launches the kernel for one tile and one GemmMath. csrc/instantiations.py lists the
// instantiations.
template <GemmMath kMath, int kTile>
void launch_tile(const KernelParams& params, cudaStream_t stream);

// As launch_tile, for a grouped product.
template <GemmMath kMath, int kTile>
void launch_grouped_tile(const KernelParams& params, cudaStream_t stream);

}  // namespace torchweld::sm90
