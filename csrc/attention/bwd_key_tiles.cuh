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
  // NOTE: batch * key_tiles fits in 32 bits, because the grid of the main kernel has a block for
  // each head of each key tile.
  const unsigned key_tiles = args.key_tiles,
                 tiles = static_cast<unsigned>(args.params.sizes.batch) * key_tiles;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int sequence = static_cast<int>(tile / key_tiles);
    const int first_key = static_cast<int>(tile % key_tiles) * args.key_tile_keys,
              end_key = first_key + args.key_tile_keys;
    int begin = INT_MAX, end = 0, first_group = INT_MAX, last_group = 0;
    if (threadIdx.x == 0) s_mask = {{begin, end}, first_group, last_group};
#pragma unroll 1
    for (int i = threadIdx.x; i < groups; i += kThreads) {
      const BlockMask& group = args.group_of(sequence, i * kAttentionBackwardRowPad);
      if (group.begin >= end_key || group.end <= first_key) continue;
      begin = min(begin, group.begin);
      end = max(end, group.end);
      first_group = min(first_group, i);
      last_group = i;
    }
    __syncthreads();
    if (end > 0) {
      atomicMin(&s_mask.keys.begin, begin);
      atomicMax(&s_mask.keys.end, end);
      atomicMin(&s_mask.first_group, first_group);
      atomicMax(&s_mask.last_group, last_group);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (s_mask.keys.end == 0) s_mask.first_group = 0;  // no rows
      args.g_key_tiles[tile] = s_mask;
    }
  }
}

}  // namespace torchweld
