// The product that ends in exponentials, as its caller sees it. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace torchweld {

// z = x @ weight^T + bias, l = log2(e) / temperature * softcap(z). Row i of y is 2^(l - k) with the
// reference exponent k of its row, or of a tile whose largest l is far above it.
struct ExponentialsParams {
  const float* reference;  // (M,) integers; inf: the row is ignored
  float* tile_reference;   // (tiles_n, M)
  float* tile_sum;         // (tiles_n, M) sums of 2^(l - k) over a tile's columns
  float* tile_moment;      // (tiles_n, M) sums of 2^(l - k) * (l - k), where asked for
  float scale;             // log2(e) / temperature
  float softcap;           // 0: none
};

// p.y: bf16, or nullptr where only the sums are wanted.
void launch_sm90_exponentials(const GemmParams& p, const ExponentialsParams& exponentials,
                              cudaStream_t stream);

// A tile whose largest l is this far above its row's reference has a reference of its own, so that
// sums stay far from the largest and their inverses from the smallest number.
inline constexpr float kMaxAboveReference = 64;

}  // namespace torchweld
