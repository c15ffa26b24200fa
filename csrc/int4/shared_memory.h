// Shared memory sizes that the tensor-core tiles have in common. Pure host code.
#pragma once

#include "int4/layout.h"

namespace torchweld {

// Bytes of the 16-bit scales and the zeros of a row tile's chunk, 8 bytes of padding included.
inline constexpr int kInt4ScaleBytes = kInt4TileRows * 2 + 16;

// Padding after a token's accumulators, in floats.
// NOTE: avoids bank conflicts when fragments are written.
inline constexpr int kInt4SumPadding = 4;

}  // namespace torchweld
