// Defines fill_key_tiles, which finds the query rows that the key tiles of attention's backward
// need under a general mask.
#pragma once

#include <climits>

#include "attention/bwd_args.cuh"

namespace torchweld {

// Fills args.g_key_tiles. All threads of a grid call this function, in blocks of kThreads threads.
// A block compares a key tile with the keys of every group of query rows. The kernel that writes
// args.g_groups must have finished.
// NOTE: work tiles don't do this for themselves, because all heads would repeat it. With 32768
// query rows, it would last as long as 20 steps of the mainloop on Hopper.
template <int kThreads>
__device__ __forceinline__ void fill_key_tiles(const MaskedBackwardArgs& args) {
  __shared__ KeyTileMask s_mask;
  const int groups = static_cast<int>(args.rows / kAttentionBackwardRowPad);
  const int64_t tiles = args.params.sizes.batch * args.key_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int sequence = static_cast<int>(tile / args.key_tiles);
    const int first_key = static_cast<int>(tile % args.key_tiles) * args.key_tile_keys,
              end_key = first_key + args.key_tile_keys;
    KeyTileMask mask = {{INT_MAX, 0}, INT_MAX, 0};
    if (threadIdx.x == 0) s_mask = mask;
    for (int i = threadIdx.x; i < groups; i += kThreads) {
      const BlockMask& group = args.group_of(sequence, i * kAttentionBackwardRowPad);
      if (group.begin >= end_key || group.end <= first_key) continue;
      mask.keys.begin = min(mask.keys.begin, group.begin);
      mask.keys.end = max(mask.keys.end, group.end);
      mask.first_group = min(mask.first_group, i);
      mask.last_group = i;
    }
    __syncthreads();
    if (mask.keys.end > 0) {
      atomicMin(&s_mask.keys.begin, mask.keys.begin);
      atomicMax(&s_mask.keys.end, mask.keys.end);
      atomicMin(&s_mask.first_group, mask.first_group);
      atomicMax(&s_mask.last_group, mask.last_group);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      mask = s_mask;
      if (mask.keys.end == 0) mask.first_group = 0;  // no rows
      args.g_key_tiles[tile] = mask;
    }
  }
}

}  // namespace torchweld
