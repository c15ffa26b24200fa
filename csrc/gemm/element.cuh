// Maps a GemmMath to the C++ type of the operands in global memory.
#pragma once

#include <type_traits>

#include "device/vec.cuh"
#include "gemm/problem.h"

namespace torchweld {

// The element type of the operands and the result in global memory.
template <GemmMath kMath>
using ElementOf =
    std::conditional_t<kMath == GemmMath::kFloat16, __half,
                       std::conditional_t<kMath == GemmMath::kBFloat16, __nv_bfloat16, float>>;

}  // namespace torchweld
