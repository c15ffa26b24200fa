// The interface of the matmul whose epilogue computes exponentials. This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

// The matmul computes l = log2(e) / temperature * softcap(x @ weight^T + bias) and stores
// y = 2^(l - k). The integer k is the row's reference exponent. If the largest l of a row in a tile
// is far above the row's reference, the tile uses a k of its own for this row.
struct ExponentialsParams {
  const float* reference;  // (M,) integers; inf for an ignored row
  float* tile_reference;   // (tiles_n, M), the k of each row in each tile
  float* tile_sum;         // (tiles_n, M), the sums of 2^(l - k) over a tile's columns
  float* tile_moment;  // (tiles_n, M), the sums of 2^(l - k) * (l - k + kAboveTarget), or nullptr
  float scale;         // log2(e) / temperature
  float softcap, inverse_softcap;  // both 0 if there is no softcap
};

// Launches the matmul. p.y is bf16, or nullptr if only the sums are requested.
void launch_exponentials_matmul(const GemmParams& p, const ExponentialsParams& exponentials,
                                cudaStream_t stream);

// If the largest l of a row in a tile exceeds the row's reference by more than kMaxAboveReference,
// the tile chooses a reference exponent of its own for this row. Thus the sums of 2^(l - k) stay
// far below the largest float, and the inverses of these sums stay far above the smallest float.
inline constexpr float kMaxAboveReference = 64;

// A row's reference exponent is l of the row's target plus kAboveTarget. Thus a tile needs another
// reference for the row only if the largest l in the tile exceeds l of the target by more than
// kAboveTarget + kMaxAboveReference = 124. y is 2^-60 at the target. Even a y that is 2^60 times
// smaller, 2^-120, is a normal bf16 number.
inline constexpr float kAboveTarget = 60;

}  // namespace torchweld
