// The named barriers of the kernel on wgmma and TMA.
#pragma once

namespace torchweld {

// Ping-pong tiles are never swap_ab tiles, so both may use 3 and 4.
enum GemmSm90Barrier : int {
  kWarpgroupWg0 = 1,      // and 2: the threads of one warpgroup
  kWarpSchedulerWg0 = 3,  // and 4: the warpgroup may issue its wgmmas (ping-pong)
  kSwapAbRightFull = 3,   // the right halves of gated results are in shared memory
  kSwapAbRightEmpty = 4   // the left halves' warpgroup has read the right ones
};

}  // namespace torchweld
