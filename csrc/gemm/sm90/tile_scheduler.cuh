// Which tiles, and which of their k_blocks of K, a worker of the grid takes. A worker is a cluster.
#pragma once

#include "core/fast_divide.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

// Tiles below `whole` are computed in rounds, each by one worker. The k-blocks of the other tiles
// are one sequence, of which every worker computes an equal range (stream-K).
struct StreamKSchedule {
  uint32_t tiles, whole, workers;
  FastDivisor k_blocks;    // of a tile
  uint32_t share, longer;  // of the row; the first `longer` workers take a step more
  uint32_t split_cluster;  // workers that are a cluster, which has a tile

  StreamKSchedule(uint32_t tiles, int64_t k_blocks, const Sm90Stream& stream)
      : tiles(tiles),
        whole(uint32_t(tiles - stream.tiles)),
        workers(uint32_t(stream.workers)),
        k_blocks(k_blocks),
        share(uint32_t(stream.tiles * k_blocks / stream.workers)),
        longer(uint32_t(stream.tiles * k_blocks % stream.workers)),
        split_cluster(uint32_t(stream.split_cluster)) {}
};

// Each worker (a cluster) first computes whole tiles in rounds: workers stay at the same k-block
// and share loads in L2. Then it computes its k-range of the stream-K tiles, last tile first. The
// worker with a tile's last k-block reduces the partials; it waits only for lower-numbered workers,
// which start no later and store their partials without waiting. With split_cluster a cluster's
// CTAs split the K of one tile and wait for each other.
template <int kCluster, bool kJoins>
class Sm90TileScheduler {
 public:
  uint32_t tile;
  int first_k_block, k_blocks;  // of the work

  explicit __device__ __forceinline__ Sm90TileScheduler(const StreamKSchedule& stream_k)
      : stream_k_(stream_k), end_(begin(stream_k, worker() + 1)), next_(worker()) {}

  // NOTE: computed anew at every use; registers are scarce.
  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  // The first k-block of a worker's range.
  static __device__ __forceinline__ uint32_t begin(const StreamKSchedule& stream_k,
                                                   uint32_t worker) {
    if (kJoins && stream_k.split_cluster > 1) {
      const uint32_t tile = worker / stream_k.split_cluster, k_blocks = stream_k.k_blocks.divisor();
      return tile * k_blocks +
             (worker - tile * stream_k.split_cluster) * k_blocks / stream_k.split_cluster;
    }
    return worker * stream_k.share + min(worker, stream_k.longer);
  }

  // Advances to the next work; false where there is none.
  __device__ __forceinline__ bool next() {
    const uint32_t tile_k_blocks = stream_k_.k_blocks.divisor();
    if (next_ < stream_k_.whole) {
      tile = next_;
      first_k_block = 0;
      k_blocks = int(tile_k_blocks);
      next_ += stream_k_.workers;
      return true;
    }
    const uint32_t range = begin(stream_k_, worker());
    if (end_ <= range) return false;
    const uint32_t at = stream_k_.k_blocks.divide(end_ - 1), start = at * tile_k_blocks;
    const uint32_t from = max(start, range);
    tile = stream_k_.whole + at;
    first_k_block = int(from - start);
    k_blocks = int(end_ - from);
    end_ = from;
    return true;
  }

  // Whether the work has the tile's last k-blocks, so that this worker runs the epilogue.
  __device__ __forceinline__ bool ends() const {
    return first_k_block + k_blocks == int(stream_k_.k_blocks.divisor());
  }
  __device__ __forceinline__ bool begins() const { return first_k_block == 0; }

  // For work that ends its tile and doesn't begin it: calls body with each peer that has other
  // k-blocks of it, from the last to the first.
  template <typename Body>
  __device__ __forceinline__ void for_each_peer(const Body& body) const {
    const uint32_t start = (tile - stream_k_.whole) * stream_k_.k_blocks.divisor();
    uint32_t peer = worker();
    do {
      body(--peer);
    } while (begin(stream_k_, peer) > start);
  }

 private:
  const StreamKSchedule& stream_k_;
  uint32_t end_, next_;
};

}  // namespace torchweld
