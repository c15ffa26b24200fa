// One launcher per kind of arithmetic, each in a .cu of its own.
#pragma once

#include "core/launch.h"
#include "gemm/gemm.h"

namespace torchweld {

template <GemmMath kMath>
void launch_gemm_math(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
