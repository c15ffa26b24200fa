// The named barriers of the matmul kernel on wgmma and TMA.
#pragma once

namespace torchweld::sm90 {

// Barriers 3 and 4 have one use in ping-pong tiles and another in swap_ab tiles. No tile is both
// ping-pong and swap_ab.
enum NamedBarrier : int {
  kWarpgroupWg0 = 1,      // barriers 1 and 2: each synchronises one warpgroup
  kWarpSchedulerWg0 = 3,  // barriers 3, 4: warpgroup 0 or 1 may issue its wgmmas (ping-pong)
  kSwapAbRightFull = 3,   // the right halves of gated results are in shared memory
  kSwapAbRightEmpty = 4,  // the warpgroup of the left halves has read the right halves
  kWarpgroupsBoth = 5     // synchronises both warpgroups (grouped products)
};

}  // namespace torchweld::sm90
