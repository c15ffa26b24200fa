// The named barriers of the matmul kernel on wgmma and TMA.
#pragma once

namespace torchweld {

// Barriers 3 and 4 have two uses, because a swap_ab tile is never a ping-pong tile.
enum GemmSm90Barrier : int {
  kWarpgroupWg0 = 1,      // 1 and 2: the threads of one warpgroup
  kWarpSchedulerWg0 = 3,  // 3 and 4: the warpgroup may issue its wgmmas (ping-pong)
  kSwapAbRightFull = 3,   // the right halves of gated results are in shared memory
  kSwapAbRightEmpty = 4   // the left halves' warpgroup has read the right halves
};

}  // namespace torchweld
