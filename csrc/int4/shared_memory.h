// What the tiles on tensor cores have alike in shared memory. Pure host code.
#pragma once

#include "int4/layout.h"

namespace torchweld {

// 16-bit scales and zeros of a tile of 16 rows and a chunk, and 8 bytes of nothing.
inline constexpr int kInt4ScaleBytes = kInt4TileRows * 2 + 16;

// Floats behind a token's sums.
// NOTE: they let fragments be written without bank conflicts.
inline constexpr int kInt4SumPadding = 4;

}  // namespace torchweld
