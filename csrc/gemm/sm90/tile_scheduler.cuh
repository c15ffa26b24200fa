// Assigns the tiles and k-blocks to the workers of the grid. A worker is a cluster of kCluster
// CTAs.
#pragma once

#include "core/fast_divide.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

// The workers compute the first whole_tiles tiles in rounds, one worker per tile. The k-blocks of
// all other tiles form one sequence, which the workers split into ranges of equal length
// (stream-K).
struct StreamKSchedule {
  uint32_t tiles, whole_tiles, workers;
  FastDivisor k_blocks;          // of one tile
  uint32_t k_blocks_per_worker;  // the length of a worker's range
  uint32_t longer_workers;       // the first workers, whose ranges are one k-block longer
  uint32_t split_cluster;        // how many workers of a cluster split the K of one tile, or 1

  StreamKSchedule(uint32_t tiles, int64_t k_blocks, const Sm90Stream& stream)
      : tiles(tiles),
        whole_tiles(uint32_t(tiles - stream.tiles)),
        workers(uint32_t(stream.workers)),
        k_blocks(k_blocks),
        k_blocks_per_worker(uint32_t(stream.tiles * k_blocks / stream.workers)),
        longer_workers(uint32_t(stream.tiles * k_blocks % stream.workers)),
        split_cluster(uint32_t(stream.split_cluster)) {}
};

// A worker first computes whole tiles in rounds; all workers stay at the same k-block and share
// loads in L2. The worker then computes its k-range of the stream-K tiles, last tile first. The
// worker that has the last k-block of a tile adds up the partials of that tile. It waits only for
// workers with lower numbers, which start no later and store their partials without waiting. If
// split_cluster > 1, the CTAs of a cluster split the K of one tile and wait for each other.
// kSplitsK says whether split_cluster may exceed 1.
template <int kCluster, bool kSplitsK>
class Sm90TileScheduler {
 public:
  uint32_t tile;
  int first_k_block, k_blocks;  // of the current work

  explicit __device__ __forceinline__ Sm90TileScheduler(const StreamKSchedule& stream_k)
      : stream_k_(stream_k), end_(begin(stream_k, worker() + 1)), next_(worker()) {}

  // NOTE: this is a function, not a member, because registers are scarce: each use recomputes it.
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

  // Advances to the next work. Returns false if there is none.
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

  // Whether the current work includes the last k-block of its tile, so that this worker runs the
  // epilogue.
  __device__ __forceinline__ bool ends() const {
    return first_k_block + k_blocks == int(stream_k_.k_blocks.divisor());
  }
  __device__ __forceinline__ bool begins() const { return first_k_block == 0; }

  // Calls body(peer) for every other worker that has k-blocks of this tile, in descending order.
  // The current work must include the tile's last k-block and not its first.
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
  uint32_t end_;   // the end of the part of the worker's k-range that is not computed yet
  uint32_t next_;  // the next whole tile
};

}  // namespace torchweld
