// Shared-memory sizes that are common to the tensor-core tiles. This is pure host code.
#pragma once

#include "int4/layout.h"

namespace torchweld {

// The size in bytes of the 16-bit scales and the zeros for one chunk of a row tile, including 8
// bytes of padding.
inline constexpr int kInt4ScaleBytes = kInt4TileRows * 2 + 16;

// The padding after the accumulators of each token in shared memory, in floats.
// NOTE: the padding avoids bank conflicts when fragments are written.
inline constexpr int kInt4SumPadding = 4;

}  // namespace torchweld
