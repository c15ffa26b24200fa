// Launches the kernel on wgmma and TMA for a product. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld {

// Parameters of a product whose choice is a tile of this engine. Rewrites operands that need it.
Sm90Params sm90_params(const GemmParams& params, cudaStream_t stream);

void launch_sm90_gemm(const GemmParams& params, cudaStream_t stream);

// K-major copies of fp32 operands: bf16 matrices that add up to the values, or one fp32 matrix. In
// a gated product the left half comes first.
struct Sm90Written {
  GemmOperand a, b;
  int64_t a_term, b_term;  // elements from one term's matrix to the next
};

// Writes the operands for which sm90_writes is true to params.written; there must be one.
Sm90Written write_sm90_operands(const GemmParams& params, cudaStream_t stream);

// Launches a kernel of one tile and dtype; csrc/instantiations.py has the instantiations.
template <GemmMath kMath, int kTile>
void launch_sm90_tile(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
