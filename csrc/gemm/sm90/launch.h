// Launches the kernel on wgmma and TMA for a product. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/sm90/params.h"

namespace torchweld {

void launch_sm90_gemm(const GemmParams& params, cudaStream_t stream);

// fp32 operands that were written anew, K-major: bf16 matrices that add up to the values, or one of
// fp32. Those of a gated product have the left half first.
struct Sm90Written {
  GemmOperand a, b;
  int64_t a_term, b_term;  // elements from one chunk to the next
};

// Writes to params.written those that sm90_writes tells of, of which there is one at least.
Sm90Written write_sm90_operands(const GemmParams& params, cudaStream_t stream);

// One tile's kernels for one kind of operands, in files of their own (csrc/instantiations.py).
template <GemmMath kMath, int kTile>
void launch_sm90_tile(const Sm90Params& params, cudaStream_t stream);

}  // namespace torchweld
