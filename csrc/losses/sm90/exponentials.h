// The interface of the matmul whose epilogue computes exponentials. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

// The matmul computes l = log2(e) / temperature * softcap(x @ weight^T + bias) and stores y = 2^(l
// - k). The integer k is the row's reference exponent. A tile whose largest l is far above the
// reference uses its own k.
struct ExponentialsParams {
  const float* reference;  // (M,) integers; inf for an ignored row
  float* tile_reference;   // (tiles_n, M), the k of each tile and row
  float* tile_sum;         // (tiles_n, M) sums of 2^(l - k) over a tile's columns
  float* tile_moment;      // (tiles_n, M) sums of 2^(l - k) * (l - k), or nullptr
  float scale;             // log2(e) / temperature
  float softcap;           // 0 if there is none
};

// Launches the matmul. p.y is bf16, or nullptr if only the sums are requested.
void launch_sm90_exponentials(const GemmParams& p, const ExponentialsParams& exponentials,
                              cudaStream_t stream);

// A tile chooses its own reference exponent if its largest l exceeds the row's reference by more
// than this. The limit keeps the sums far below the largest float, and their inverses far above the
// smallest.
inline constexpr float kMaxAboveReference = 64;

}  // namespace torchweld
