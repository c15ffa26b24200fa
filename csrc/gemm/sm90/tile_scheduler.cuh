// Assigns tiles and k-blocks to the workers. A worker is a cluster of kCluster CTAs.
#pragma once

#include "core/fast_divide.h"
#include "gemm/sm90/tiles.h"

namespace torchweld::sm90 {

// The workers compute the first whole_tiles tiles in rounds: in each round, a worker computes one
// tile. All other tiles are stream-K tiles: their k-blocks form one sequence, which is divided into
// one range per worker. The lengths of these ranges differ by at most one k-block.
struct StreamKSchedule {
  uint32_t tiles, whole_tiles, workers;
  FastDivisor k_blocks;          // divides by the number of k-blocks of one tile
  uint32_t k_blocks_per_worker;  // the minimum number of k-blocks in a worker's range
  uint32_t longer_workers;       // the number of workers with k_blocks_per_worker + 1 k-blocks
  uint32_t split_cluster;        // size of the cluster that splits the K of a tile, else 1

  StreamKSchedule(uint32_t tiles, int64_t k_blocks, const StreamKPlan& stream)
      : tiles(tiles),
        whole_tiles(uint32_t(tiles - stream.tiles)),
        workers(uint32_t(stream.workers)),
        k_blocks(k_blocks),
        k_blocks_per_worker(uint32_t(stream.tiles * k_blocks / stream.workers)),
        longer_workers(uint32_t(stream.tiles * k_blocks % stream.workers)),
        split_cluster(uint32_t(stream.split_cluster)) {}
};

// A worker first computes whole tiles in rounds. In a round all workers are at about the same
// k-block, so they share loads in L2. The worker then computes its range of k-blocks of the
// stream-K tiles. If the range covers several tiles, the worker begins with the last of them. The
// worker that computes the last k-block of a tile adds up the partial sums of that tile. For this
// it waits only for workers with lower numbers, which start no later. There is no deadlock, because
// each worker stores its partial sums before it waits for other workers.
template <int kCluster, bool kSplitsK>
class TileScheduler {
 public:
  uint32_t tile;
  int first_k_block, k_blocks;  // the range of k-blocks of `tile` that this worker computes

  template <class Params>
  explicit __device__ __forceinline__ TileScheduler(const Params& p)
      : stream_k_(p.stream_k), end_(begin(p.stream_k, worker() + 1)), next_(worker()) {}

  // NOTE: the index of the worker is a function, not a data member. Every use computes it again,
  // because registers are scarce.
  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  // Returns where a worker's range begins in the sequence of the k-blocks of all stream-K tiles.
  static __device__ __forceinline__ uint32_t begin(const StreamKSchedule& stream_k,
                                                   uint32_t worker) {
    if (kSplitsK && stream_k.split_cluster > 1) {
      const uint32_t tile = worker / stream_k.split_cluster, k_blocks = stream_k.k_blocks.divisor();
      return tile * k_blocks +
             (worker - tile * stream_k.split_cluster) * k_blocks / stream_k.split_cluster;
    }
    return worker * stream_k.k_blocks_per_worker + min(worker, stream_k.longer_workers);
  }

  // Advances to the next tile, or part of a tile, of this worker. Returns false if the worker has
  // no more work.
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

  template <int kBlockK>
  __device__ __forceinline__ int first_k() const {
    return first_k_block * kBlockK;
  }

  // What a consumer does with a k-block in shared memory before it multiplies it: nothing.
  template <class Shared>
  __device__ __forceinline__ auto preparation(Shared&) const {
    return [](int, int) {};
  }

  // Whether the current range of k-blocks includes the last k-block of the tile. If it does, this
  // worker runs the epilogue of the tile.
  __device__ __forceinline__ bool ends() const {
    return first_k_block + k_blocks == int(stream_k_.k_blocks.divisor());
  }
  __device__ __forceinline__ bool begins() const { return first_k_block == 0; }

  // Calls body(peer) for every other worker that computes k-blocks of the current tile, from the
  // highest to the lowest worker number. The current range must include the last k-block of the
  // tile and must not include the first one.
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
  uint32_t end_;   // the end of the k-blocks that remain in the worker's range
  uint32_t next_;  // the next whole tile of this worker
};

}  // namespace torchweld::sm90
