// The C++ types that a GemmMath stands for.
#pragma once

#include <type_traits>

#include "device/vec.cuh"
#include "gemm/problem.h"

namespace torchweld {

// What memory holds of operands and results.
template <GemmMath kMath>
using ElementOf =
    std::conditional_t<kMath == GemmMath::kFloat16, __half,
                       std::conditional_t<kMath == GemmMath::kBFloat16, __nv_bfloat16, float>>;

}  // namespace torchweld
