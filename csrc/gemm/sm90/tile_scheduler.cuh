// The tiles and k-blocks that each worker of the grid computes. A worker is a cluster.
#pragma once

#include "core/fast_divide.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

// The first whole_tiles tiles are computed in rounds, each by one worker. The k-blocks of the other
// tiles form one sequence, which the workers split into equal ranges (stream-K).
struct StreamKSchedule {
  uint32_t tiles, whole_tiles, workers;
  FastDivisor k_blocks;          // of a tile
  uint32_t k_blocks_per_worker;  // of a worker's range
  uint32_t longer_workers;       // the first ones, whose range is one k-block longer
  uint32_t split_cluster;        // workers of a cluster that split the K of one tile, or 1

  StreamKSchedule(uint32_t tiles, int64_t k_blocks, const Sm90Stream& stream)
      : tiles(tiles),
        whole_tiles(uint32_t(tiles - stream.tiles)),
        workers(uint32_t(stream.workers)),
        k_blocks(k_blocks),
        k_blocks_per_worker(uint32_t(stream.tiles * k_blocks / stream.workers)),
        longer_workers(uint32_t(stream.tiles * k_blocks % stream.workers)),
        split_cluster(uint32_t(stream.split_cluster)) {}
};

// A worker first computes whole tiles in rounds: all workers stay at the same k-block and share
// loads in L2. Then it computes its k-range of the stream-K tiles, last tile first. The worker with
// a tile's last k-block adds up the partials. It waits only for workers with lower numbers, which
// start no later and store their partials without waiting. With split_cluster > 1 the CTAs of a
// cluster split the K of one tile and wait for each other. kSplitsK: split_cluster may exceed 1.
template <int kCluster, bool kSplitsK>
class Sm90TileScheduler {
 public:
  uint32_t tile;
  int first_k_block, k_blocks;  // of the work

  explicit __device__ __forceinline__ Sm90TileScheduler(const StreamKSchedule& stream_k)
      : stream_k_(stream_k), end_(begin(stream_k, worker() + 1)), next_(worker()) {}

  // NOTE: a function, not a member: it is recomputed at every use, because registers are scarce.
  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  // The first k-block of a worker's range.
  static __device__ __forceinline__ uint32_t begin(const StreamKSchedule& stream_k,
                                                   uint32_t worker) {
    if (kSplitsK && stream_k.split_cluster > 1) {
      const uint32_t tile = worker / stream_k.split_cluster, k_blocks = stream_k.k_blocks.divisor();
      return tile * k_blocks +
             (worker - tile * stream_k.split_cluster) * k_blocks / stream_k.split_cluster;
    }
    return worker * stream_k.k_blocks_per_worker + min(worker, stream_k.longer_workers);
  }

  // Advances to the next work; false where there is none.
  __device__ __forceinline__ bool next() {
    const uint32_t tile_k_blocks = stream_k_.k_blocks.divisor();
    if (next_ < stream_k_.whole_tiles) {
      tile = next_;
      first_k_block = 0;
      k_blocks = int(tile_k_blocks);
      next_ += stream_k_.workers;
      return true;
    }
    const uint32_t range = begin(stream_k_, worker());
    if (end_ <= range) return false;
    const uint32_t streamed = stream_k_.k_blocks.divide(end_ - 1);
    const uint32_t start = streamed * tile_k_blocks, from = max(start, range);
    tile = stream_k_.whole_tiles + streamed;
    first_k_block = int(from - start);
    k_blocks = int(end_ - from);
    end_ = from;
    return true;
  }

  // Whether the work has the tile's last k-block, so that this worker runs the epilogue.
  __device__ __forceinline__ bool ends() const {
    return first_k_block + k_blocks == int(stream_k_.k_blocks.divisor());
  }
  __device__ __forceinline__ bool begins() const { return first_k_block == 0; }

  // Calls body with every other worker that has k-blocks of the tile, in descending order. The work
  // must end its tile and not begin it.
  template <typename Body>
  __device__ __forceinline__ void for_each_peer(const Body& body) const {
    const uint32_t start = (tile - stream_k_.whole_tiles) * stream_k_.k_blocks.divisor();
    uint32_t peer = worker();
    do {
      body(--peer);
    } while (begin(stream_k_, peer) > start);
  }

 private:
  const StreamKSchedule& stream_k_;
  uint32_t end_;   // of the rest of the worker's k-range
  uint32_t next_;  // whole tile
};

}  // namespace torchweld
